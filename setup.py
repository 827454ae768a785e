"""What a build is made of goes into it: the commit, for `kv --version -v`, and a checksum of the C sources. All else is
in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
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


class BuildExt(build_ext):
    def build_extension(self, ext):
        if ext.name == "kvcli.kernels.cpu._cpu":
            folder = ROOT / "kvcli" / "kernels" / "cpu"
            checksum = runpy.run_path(str(folder / "sources.py"))["checksum"](folder)
            ext.define_macros.append(("KV_SOURCES", f'"{checksum}"'))
        super().build_extension(ext)


setup(cmdclass={"build_py": BuildPy, "build_ext": BuildExt})
