"""What to type for a package that is missing: the one spelling of our extras in every message."""


def extra(name: str) -> str:
    """The command that installs the packages of an extra."""
    return f"pip install 'deepstow[{name}]'"


def needs(package: str, name: str) -> str:
    """What an error says of a missing ``package``, which the extra ``name`` brings."""
    return f"needs the package {package}; install it with: {extra(name)}"
