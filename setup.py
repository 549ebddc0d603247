"""What pyproject.toml cannot say: the CPU library in the wheel, and links that work outside the repository."""

import os
import re
import runpy
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

CPU = "moe_nvfp4/kernels/cpu"
made_from = runpy.run_path(f"{CPU}/sources.py")


class BuildLibrary(build_ext):
    """A shared library for ctypes: one for all Pythons, so its name has no tag of one."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"


class Wheel(bdist_wheel):
    """py3-none-PLATFORM with the library, py3-none-any where it could not be built."""

    def run(self):
        self.run_command("build")
        self.root_is_pure = not all(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs()))
        super().run()

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class SourceDistribution(sdist):
    """With the two symlinks of the source tree, so that its tests run where it is unpacked."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in ("quantize", "integrations"):
            os.symlink(os.path.join("..", name), os.path.join(base_dir, "moe_nvfp4", name))


def readme():
    """README.md for a package index, which knows none of our files: links absolute, or plain text while
    [project.urls] in pyproject.toml names no Repository."""
    text = Path("README.md").read_text("utf-8")
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    url = project.get("urls", {}).get("Repository", "").rstrip("/")
    relative = r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)"
    if url:
        text = re.sub(r"!" + relative, rf"![\1]({url}/raw/HEAD/\2)", text)
        return re.sub(r"(?<!!)" + relative, rf"[\1]({url}/blob/HEAD/\2)", text)
    return re.sub(relative, r"\1", re.sub(r"!" + relative, "", text))


library = Extension(
    "moe_nvfp4.kernels.cpu._cpu",
    [f"{CPU}/cpu.c"],
    depends=[f"{CPU}/{name}" for name in made_from["SOURCES"]],
    define_macros=[("SOURCES", f'"{made_from["checksum"]()}"')],
    extra_compile_args=[flag for flag in made_from["FLAGS"] if flag != "-shared"] + ["-g0"],
    extra_link_args=["-pthread"],
    optional=True,
)
setup(
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel, "sdist": SourceDistribution},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
