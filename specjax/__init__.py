"""specjax."""
