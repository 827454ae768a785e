"""Keeps the commit that a build is made of in the package, for `kv --version -v`. All else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from kvcli import versions  # noqa: E402


class BuildPy(build_py):
    def run(self):
        super().run()
        commit = versions.of_checkout(ROOT)
        if commit and not self.editable_mode:  # an editable install asks the checkout itself
            (Path(self.build_lib) / "kvcli" / versions.COMMIT_FILE).write_text(f"{commit}\n", "ascii")


setup(cmdclass={"build_py": BuildPy})
