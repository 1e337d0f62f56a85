"""Tasks, data formats, readers, exporters, recipes and callbacks: found by the name that a config has for them.

A name is one of the tree, or an entry point of an installed package. ``module:Class`` is a class of a module that needs
no packaging: a file beside the config or in the folder of the command, else whatever Python finds. ``folder/file.py``
may stand for the module. Only what a config names is imported.

Invariant. Names are stated once: by a thing in its own file. Lists, messages and schema come from ``names``. A class
from outside is looked at before it is used, and what it raises later is one line with its name.

Refused: a name that two claim; modules that cannot be imported; classes of another kind, without a method that is
needed, or with another signature.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from deepstow.trainer.errors import UserError, first_line, nearest

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)
Method = TypeVar("Method", bound=Callable[..., Any])
REFERENCE = r"[\w./~-]+:[A-Za-z_]\w*"
LIKE = "module:Class, as in my_module:{}"


class Unusable(ValueError):
    """What is wrong with a thing that a config names, in words that follow its key and value."""


class Raised(UserError):
    """Code from outside has raised an error, in one line with its name."""


class Registry(Mapping[str, T], Generic[T]):
    """The things of one kind. As a mapping: those of the tree.

    Args:
        base: what they derive from. Methods that raise NotImplementedError are marked with ``needed``.
        group: of entry points.
        package: dotted name of the package, or module, in whose files the tree has its own.
    """

    def __init__(self, base: type[T], group: str, package: str) -> None:
        self.base = base
        self.group = group
        self._package = package
        self._kinds = dict[str, type[T]]()

    def add(self, kind: Kind) -> Kind:
        """Decorator of a class in the tree, which has a ``name``."""
        name = vars(kind)["name"]
        assert name not in self._kinds, f"{name}: {self._kinds[name].__module__} and {kind.__module__} claim it"
        self._kinds[name] = kind
        return kind

    @cached_property
    def _ours(self) -> dict[str, T]:
        package = import_module(self._package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
            import_module(f"{self._package}.{module.name}")
        return {name: kind() for name, kind in sorted(self._kinds.items(), key=lambda each: each[1].__module__)}

    def __getitem__(self, name: str) -> T:
        return self._ours[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ours)

    def __len__(self) -> int:
        return len(self._ours)

    @cached_property
    def _entries(self) -> tuple[EntryPoint, ...]:
        return tuple(entry_points(group=self.group))

    def names(self) -> tuple[str, ...]:
        """Of the tree and of installed packages; the latter are not imported."""
        return (*self, *sorted({entry.name for entry in self._entries} - {*self}))

    def found(self, name: str, folders: Sequence[Path] = ()) -> T:
        """The thing of a name or ``module:Class``, looked for in these ``folders`` first. Raise Unusable."""
        claims = [entry for entry in self._entries if entry.name == name]
        if len(claims) + (name in self) > 1:
            who = ["deepstow"] * (name in self)
            who += [f"{claim.dist.name if claim.dist else '?'} ({claim.value})" for claim in claims]
            raise Unusable(f"{' and '.join(who)} claim it; uninstall one, or write module:Class of the one meant")
        if name in self:
            return self[name]
        if not claims and ":" not in name:
            raise Unusable(f"is none of {', '.join(self.names())}, nor {LIKE.format(self.base.__name__)}")
        return outside(self.base, name, claims[0].value if claims else name, tuple(folders))


def outside(base: type[T], name: str, reference: str, folders: tuple[Path, ...]) -> T:
    """The thing that ``module:Class`` names, as a ``base`` of this ``name``. Raise Unusable."""
    kind = guarded(checked(class_of(reference, folders), base), base, name)
    members: Any = {"name": name, "code": code_of(kind)}
    members["__reduce__"] = lambda self: (outside, (base, name, reference, folders))  # for processes that are spawned
    for key, value in members.items():
        setattr(kind, key, value)
    try:
        return kind()
    except Exception as error:
        raise Unusable(f"cannot be made: {first_line(error)}{place(error)}") from None


def needed(method: Method) -> Method:
    """Decorator of a method without which nothing from outside can do."""
    method.needed = True  # type: ignore[attr-defined]
    return method


def imported(name: str, folders: Sequence[Path] = ()) -> ModuleType:
    """A module by its dotted name, or by the path of its file: a file below one of these ``folders`` or the folder of
    the command, else what Python finds. Either runs once: a file is known to Python by its path, which hides no other
    module. Raise Unusable if two of these folders have such a file.
    """
    written = Path(name).expanduser() if name.endswith(".py") else Path(*name.split(".")).with_suffix(".py")
    places = dict.fromkeys((folder / written).absolute().resolve() for folder in (*folders, Path()))
    files = [file for file in places if file.is_file()]
    if len(files) > 1:
        raise Unusable(f"{files[0]} and {files[1]} are both called so; write the path of the one meant")
    if not files:
        if name.endswith(".py"):
            raise Unusable(f"there is no file {written}")
        return import_module(name)
    module_name = str(files[0])
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = spec_from_file_location(module_name, files[0])
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = sys.modules[module_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def named(reference: str, folders: Sequence[Path] = ()) -> Any:
    """What ``module:name`` names. Raise Unusable if it cannot be imported, or is not there."""
    module_name, _, name = reference.partition(":")
    try:
        module = imported(module_name, folders)
    except Unusable:
        raise
    except (Exception, SystemExit) as error:
        where = "from the folder of the config, that of the command, or by Python"
        raise Unusable(f"{module_name} cannot be imported {where}: {first_line(error)}{place(error)}") from None
    if not hasattr(module, name):
        functions = [function for function, value in vars(module).items() if callable(value)]
        raise Unusable(f"{module_name} has no {name}{nearest(name, functions)}")
    return getattr(module, name)


def class_of(reference: str, folders: Sequence[Path] = ()) -> type:
    """The class that ``module:Class`` names. Raise Unusable."""
    kind = named(reference, folders)
    if not isinstance(kind, type):
        raise Unusable(f"{reference.partition(':')[2]} is no class")
    return kind


def checked(kind: type, base: type[T]) -> type[T]:
    """``kind``, if it is a ``base`` that can be used as one. Raise Unusable."""
    name = kind.__name__
    if not issubclass(kind, base):
        raise Unusable(f"{name} is no {base.__name__}; derive it from {base.__module__}.{base.__name__}")
    if kind is base:
        raise Unusable(f"{name} is what others derive from; name a class of your own")
    for method, ours in vars(base).items():
        theirs = inspect.getattr_static(kind, method)
        if method.startswith("_") or not inspect.isfunction(ours) or theirs is ours:
            if getattr(ours, "needed", False):
                raise Unusable(f"{name} has no method {method}{_shown(ours)}")
            continue
        if not inspect.isfunction(theirs):
            raise Unusable(f"{name}.{method} is no method; it is to be {method}{_shown(ours)}")
        if not _takes(theirs, ours):
            raise Unusable(f"{name}.{method} takes {_shown(theirs)}, and is called with {_shown(ours)}")
    return kind


def _shown(method: Callable[..., Any]) -> str:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))


def _takes(theirs: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether a method can be called as ``ours`` is."""
    parameters = inspect.signature(ours).parameters.values()
    values = [None for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    by_name = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        by_name["anything"] = None
    try:
        inspect.signature(theirs).bind(*values, **by_name)
    except TypeError:
        return False
    return True


def guarded(kind: type[T], base: type, name: str) -> type[T]:
    """A subclass of ``kind`` that does the same. What a method of ``base`` raises is Raised, in one line with the
    ``name`` of the thing, but for what the user is told already.
    """
    methods = {
        method: _guard(inspect.getattr_static(kind, method), name)
        for method, ours in vars(base).items()
        if inspect.isfunction(ours) and not method.startswith("_") and inspect.getattr_static(kind, method) is not ours
    }
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**same, **methods})


def _guard(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with blamed(name, method.__name__):
            result = method(*args, **kwargs)
        return through(result) if isinstance(result, Iterator) else result

    def through(items: Iterator[Any]) -> Iterator[Any]:
        with blamed(name, method.__name__):
            yield from items

    return call


@contextmanager
def blamed(name: str, method: str) -> Iterator[None]:
    """What is raised inside, and is no UserError, is Raised: one line with the ``name`` of a thing from outside."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise Raised(f"{name}: {method} has raised {first_line(error)}{place(error)}") from error


def place(error: BaseException) -> str:
    """`` (file.py:12)``, where an error of code from outside was raised: the innermost line that is of no library."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    libraries = ("site-packages", "<frozen", sysconfig.get_path("stdlib"))
    own_frames = [frame for frame in frames if not any(library in frame.filename for library in libraries)]
    return f" ({own_frames[-1].filename}:{own_frames[-1].lineno})" if own_frames else ""


def code_of(kind: type) -> str:
    """A hash of the file that has a class from outside: what was made by another one is made anew."""
    file = inspect.getsourcefile(inspect.unwrap(kind))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def codes(things: Iterable[Any]) -> dict[str, str]:
    """The hash of the file of each thing from outside, by the name that the config has for it."""
    return {thing.name: thing.code for thing in things if getattr(thing, "code", None)}
