"""Step `humaneval`: runs the greedy answers against HumanEval's tests -> evaluation/humaneval.json.

Every program runs in a process of its own with limits on time, memory, files and processes, and, where the machine
allows it, without a network and as nobody. Run it in a container all the same: the programs come from a model.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 5
RUNNER = "import sys; exec(compile(sys.stdin.read(), 'answer', 'exec'), {'__name__': 'answer'})"


def body_of(answer: str) -> str:
    """The answer up to the first line that no longer belongs to the function."""
    lines = []
    for line in answer.split("\n"):
        if line and not line[0].isspace() and line[0] not in ")]}#":
            break
        lines.append(line)
    return "\n".join(lines)


def _limits() -> None:
    for what, limit in (
        (resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        resource.setrlimit(what, (limit, limit))


def _cage() -> tuple[list[str], bool]:
    """The command that runs a program, without network and rights as far as this machine allows, and whether it does."""
    nobody = ["unshare", "-n", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for prefix in (nobody, ["unshare", "-rn"]):
        for python in (
            sys.executable,
            str(Path(sys.executable).resolve()),
        ):  # nobody may not reach a virtual environment
            command = [*prefix, "env", "-i", python, "-I", "-B", "-c"]
            if shutil.which("unshare") and not subprocess.run([*command, "pass"], capture_output=True).returncode:
                return command, True
    return ["env", "-i", sys.executable, "-I", "-B", "-c"], False


def passes(problem: dict, answer: str, command: list[str], folder: str) -> str:
    """ "passed", "syntax", "timeout" or the name of the error."""
    source = problem["prompt"] + body_of(answer) + "\n"
    try:
        compile(source, "answer", "exec")
    except (SyntaxError, ValueError):
        return "syntax"
    source += f"{problem['test']}\ncheck({problem['entry_point']})\nprint('all passed')\n"
    try:
        done = subprocess.run(  # fmt: skip
            [*command, RUNNER],
            input=source,
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            cwd=folder,
            preexec_fn=_limits,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0 and done.stdout.endswith("all passed\n"):
        return "passed"
    return (done.stderr.strip().split("\n")[-1].split(":")[0] or f"exit {done.returncode}")[:40]


def run(work: Path) -> dict:
    problems = json.loads((work / "corpus" / "humaneval.json").read_text())
    answers = json.loads((work / "evaluation" / "answers.json").read_text())["texts"]["humaneval"]
    command, isolated = _cage()
    results, reference = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        for problem, answer in zip(problems, answers, strict=False):
            results[problem["task_id"]] = passes(problem, answer, command, folder)
            reference += passes(problem, problem["canonical_solution"], command, folder) == "passed"
    passed = [task for task, result in results.items() if result == "passed"]
    kinds = {kind: sum(r == kind for r in results.values()) for kind in sorted(set(results.values()))}
    report = dict(
        problems=len(results), passed=len(passed), tasks=passed, compiled=len(results) - kinds.get("syntax", 0),
        outcomes=kinds, reference_solutions_passed=reference, isolated=isolated,
    )  # fmt: skip
    (work / "evaluation" / "humaneval.json").write_text(json.dumps(report, indent=1))
    print(f"pass@1 {len(passed)}/{len(results)}; reference solutions {reference}/{len(results)}; {kinds}", flush=True)
    return report
