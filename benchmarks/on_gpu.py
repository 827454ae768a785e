"""What only a GPU can show, in one go: compiles the C part, runs the tests of GPUs, times what the documentation says.

    python benchmarks/on_gpu.py OUT                           # everything, each GPU of this machine taking the next job
    python benchmarks/on_gpu.py OUT tests decode --minutes 8  # some of it; what is not done by then is stopped
    python benchmarks/on_gpu.py OUT --models FOLDER           # 8b.gguf there is made where it is missing
    python benchmarks/on_gpu.py OUT --list                    # the jobs and their commands

OUT/JOB.txt has what a job's commands print, as they print it; a table of all jobs is printed, and is OUT/jobs.txt. Jobs
that need smollm2.gguf or gemma3.gguf are left out where FOLDER has none. Exits with 1 unless all were done.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILING = ("targets", "forked", "hashes")  # need no GPU
TESTS = "tests/kernels/test_gpu_*.py tests/engine/test_gpu_*.py tests/cache/test_gpu_eviction.py"
BENCH = "kv bench -m 8b.gguf"
JOBS = {
    "tests": [
        f"python -m pytest -p no:cacheprovider -o addopts=-q -o timeout=0 -n CORES -rf {TESTS} "
        + " ".join(f"--deselect tests/kernels/test_gpu_{name}.py" for name in COMPILING)
    ],
    "start": ["python benchmarks/start.py run -m 8b.gguf -n 1 --temp 0 hi"],
    "keepalive": [
        "python -m pytest -p no:cacheprovider -o addopts=-q -o timeout=0 -n 0 tests/keepalive/test_gpu_keepalive.py",
        "python benchmarks/keepalive.py 8b.gguf --brief",
    ],
    "followups": [f"{BENCH} -p 1,16,64 -n 0 -d 8192 -r 9"],
    "decode": [
        f"{BENCH} -ct {type} -p 0 -n 128 -d 0,256,2k,8k,32k,64k,120000 -r 3" for type in ("f16", "fp8", "int8", "int4")
    ],
    "prompts": [f"{BENCH} -ct {type} -p 512,2048,8192,32768 -n 0 -r 3" for type in ("f16", "int4")],
    "token": ["python benchmarks/gpu_token.py 8b.gguf --cases f16:0,f16:32k,int4:32k"],
    "steps": ["python benchmarks/gpu_steps.py 8b.gguf"],
    "throughput": ["kv eval throughput -m 8b.gguf -ct int4 --tokens 4k --parallel 1,2,4,8,16,32,64 --trials 2"],
    "few": ["python benchmarks/gpu_few.py"],
    "pages": [
        "python benchmarks/gpu_choosing.py 8b.gguf",
        *(f"{BENCH} -p 0 -n 64 -r 3 -d {sizes}" for sizes in ("32k --attend pages:128", "8k")),
    ],
    "noting": [
        "python benchmarks/gpu_choosing.py 8b.gguf --noting",
        "python benchmarks/gpu_mass.py",
        *(f"{BENCH} -p 8192 -n 0 -r 3{more}" for more in ("", " --evict h2o --budget 100%")),
    ],
    "latents": ["python benchmarks/latents.py"],
    "serve": [
        "python benchmarks/serve.py 8b.gguf --clients 1,16,64 --prompt 200 --tokens 128 --rounds 2 --settle 9 "
        "-- --parallel 64 --queue 128 -c 1k"
    ],
    "guesses": [f"kv bench -m {name}.gguf --spec suffix -p 512 -n 256 -r 4" for name in ("smollm2", "gemma3")],
    "repeats": ["python benchmarks/repeats.py 8b.gguf -ct f16,int4 --pairs 20 --device cuda"],
}


@dataclass
class Done:
    job: str
    seconds: float
    status: str


class Runner:
    """Takes jobs one after the other, one thread for each GPU."""

    def __init__(self, out: Path, models: Path, jobs: list[str], until: float) -> None:
        self.out, self.models, self.until = out, models, until
        self.left, self.done = deque(jobs), list[Done]()

    def run(self, cards: list[str]) -> bool:
        """Whether all went well."""
        threads = [threading.Thread(target=self._take, args=(card,)) for card in cards]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return all(each.status == "done" for each in self.done)

    def table(self) -> str:
        rows = [f"{each.job:12} {each.seconds:6.0f} s  {each.status}" for each in self.done]
        return "\n".join([*rows, *(f"{job:12}           not begun" for job in self.left)]) + "\n"

    def _take(self, card: str) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": card, "KV_TEST_MODELS": str(self.models)}
        environment["TRITON_CACHE_DIR"] = str(self.out / f"kernels-{card}")
        while time.monotonic() < self.until:
            try:
                job = self.left.popleft()
            except IndexError:
                return
            begun = time.monotonic()
            status = self._job(job, environment)
            self.done.append(Done(job, time.monotonic() - begun, status))
            (self.out / "jobs.txt").write_text(self.table())

    def _job(self, job: str, environment: dict[str, str]) -> str:
        with open(self.out / f"{job}.txt", "wb", 0) as log:
            for command in JOBS[job]:
                log.write(f"$ {command}\n".encode())
                given = parts(command, self.models)
                if lacking := [each for each in given if each.endswith(".gguf") and not Path(each).exists()]:
                    return f"left out: no {lacking[0]}"
                process = subprocess.Popen(
                    given, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
                try:
                    status = process.wait(max(self.until - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return "stopped, no time left"
                if status:
                    return f"failed ({status})"
        return "done"


def parts(command: str, models: Path) -> list[str]:
    """A command with this Python, this `kv`, and models where they are."""
    programs = {"kv": [sys.executable, "-m", "kvcli"], "python": [sys.executable]}
    found: list[str] = []
    for word in shlex.split(command):
        if "*" in word:
            found += sorted(str(each.relative_to(ROOT)) for each in ROOT.glob(word))
        elif word.endswith(".gguf"):
            found.append(str(models / word))
        else:
            found += programs.get(word, [str(os.cpu_count() or 1) if word == "CORES" else word])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--models", type=Path, default=Path("models-on-gpu"))
    parser.add_argument("--cards", help="such as 0,1; all of this machine if left out")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if unknown := [job for job in given.jobs if job not in JOBS]:
        parser.error(f"no job {unknown[0]}: there are {', '.join(JOBS)}")
    jobs = given.jobs or list(JOBS)
    if given.list:
        print("\n".join(f"{job}: {command}" for job in jobs for command in JOBS[job]))
        return 0
    until = time.monotonic() + 60 * given.minutes
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    cards = given.cards or ",".join(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())
    out, models = given.out.resolve(), given.models.resolve()
    for folder in (out, models):
        folder.mkdir(parents=True, exist_ok=True)
    building = subprocess.Popen(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    needed = any("8b.gguf" in command for job in jobs for command in JOBS[job])
    if needed and not (model := models / "8b.gguf").exists():
        subprocess.run([sys.executable, "benchmarks/synthetic.py", "8b", str(model)], cwd=ROOT, check=True)
    if building.wait():
        sys.exit("the C part was not built")
    runner = Runner(out, models, jobs, until)
    well = runner.run(cards.split(","))
    print(runner.table(), end="")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
