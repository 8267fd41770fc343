"""One file a command: a frozen dataclass whose fields are its flags."""
