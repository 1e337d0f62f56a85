"""Entry points: argv in, exit code out. Thin."""
