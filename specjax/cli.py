"""The `specjax` command and its subcommands.

Bad input ends in one line on stderr and exit status 2.
"""

import contextlib
import dataclasses
import errno
import io
import re
import sys
import typing
from typing import Annotated, Any

import tyro

from specjax import preemption
from specjax.commands import bench, certify, cost, generate, listing, plan, train, tree

EXPECTED = (
    ValueError,
    KeyError,
    OSError,
    FloatingPointError,
    ModuleNotFoundError,
    NotImplementedError,
)

Command = (
    Annotated[bench.Bench, tyro.conf.subcommand("bench")]
    | Annotated[certify.Certify, tyro.conf.subcommand("certify")]
    | Annotated[cost.Cost, tyro.conf.subcommand("cost")]
    | Annotated[generate.Generate, tyro.conf.subcommand("generate")]
    | Annotated[plan.Plan, tyro.conf.subcommand("plan")]
    | Annotated[train.Train, tyro.conf.subcommand("train")]
    | Annotated[tree.FindTree, tyro.conf.subcommand("tree")]
    | Annotated[listing.Drafters, tyro.conf.subcommand("drafters")]
    | Annotated[listing.Info, tyro.conf.subcommand("info")]
)


def gathered(args: list[str]) -> list[str]:
    """The values of a list that is given in parts (--field a=1 --field b=2) in one
    place: of a flag that is repeated tyro keeps the last."""
    kinds: dict[str, Any] = {}
    for command in typing.get_args(Command):
        kind, settings = typing.get_args(command)
        kinds[settings.name] = kind
    fields = dataclasses.fields(kinds[args[0]]) if args and args[0] in kinds else ()
    lists = {f"--{f.name.replace('_', '-')}" for f in fields if "tuple[" in str(f.type)}
    groups: list[list[str]] = [[]]
    places: dict[str, list[str]] = {}
    for arg in args:
        flag, given, value = arg.partition("=")
        flag = flag.replace("_", "-")
        if not arg.startswith("--"):
            groups[-1].append(arg)
        elif flag not in lists:
            groups.append([arg])
        else:
            if flag not in places:
                groups.append(places.setdefault(flag, [flag]))
            groups.append(places[flag])
            groups[-1] += [value] if given else []
    once = {id(group): group for group in groups}  # where each was first
    return [arg for group in once.values() for arg in group]


def parse(args: list[str] | None):
    """Reads the flags; what tyro would print in a box becomes one line."""
    args = gathered(sys.argv[1:] if args is None else args)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Command,  # pyright: ignore[reportArgumentType]
                prog="specjax",
                description="Trained drafters for speculative decoding, made exact.",
                args=args,
                config=(tyro.conf.OmitSubcommandPrefixes,),
            )
    except SystemExit as stop:
        if stop.code:
            words = re.sub(r"[\u2500-\u257f]+", " ", said.getvalue())
            print(f"specjax: {' '.join(words.split())}", file=sys.stderr)
        raise


def main(args: list[str] | None = None) -> None:
    """Entry point of the `specjax` command."""
    command = parse(args)

    import jax

    from specjax import distributed, targets

    jax.config.update("jax_compilation_cache_dir", str(targets.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        command.run()
    except preemption.Stopped as stop:
        if distributed.is_first():
            print(f"specjax: {stop}; run the same command to go on.")
    except KeyboardInterrupt:
        print("specjax: interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except EXPECTED as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        if getattr(error, "errno", None) == errno.ENOSPC:
            message = (
                f"the disk is full ({error}); free some and run the command again."
            )
        print(f"specjax: {message}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
