"""A mutation: a fault that a developer could make, as a change of one place in one file.

The mutations are in `lists`, one file for each subject. A list has the key `subject` and tables `[[mutation]]` with the
fields of `Mutation`; texts of several lines stand between three apostrophes.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).resolve().parent / "lists"
_COMPILED = (".c", ".cpp", ".h")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A fault in the code."""

    name: str
    subject: str
    file: str
    """Path from the root of the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    """Text in place of `old`."""
    effect: str
    """What a user would see."""
    tests: tuple[str, ...]
    """Test files, or tests as pytest names them, that run first because they probably catch the fault."""
    build: str | None = None
    """The only build of the C++ kernels that has the fault; None if all have it."""

    @property
    def is_compiled(self) -> bool:
        """Whether the file takes effect only after it is compiled."""
        return self.file.endswith(_COMPILED)

    def applied_to(self, text: str) -> str:
        """Return `text`, the content of the file, with the fault; raise ValueError unless `old` occurs once in it."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}; adapt it to the code")
        return text.replace(self.old, self.new)


def load_mutations(folder: Path = LISTS) -> dict[str, Mutation]:
    """Return all mutations by name, in the order of the lists.

    Raises ValueError if two have the same name, and TypeError for an unknown or missing field.
    """
    mutations: dict[str, Mutation] = {}
    for path in sorted(folder.glob("*.toml")):
        found = tomllib.loads(path.read_text())
        for fields in found["mutation"]:
            mutation = Mutation(**{**fields, "subject": found["subject"], "tests": tuple(fields["tests"])})
            if mutation.name in mutations:
                raise ValueError(f"two mutations are named {mutation.name}; rename one in {path.name}")
            mutations[mutation.name] = mutation
    return mutations


def test_file(test: str) -> str:
    """Return the file of a test as pytest names it."""
    return test.partition("::")[0]
