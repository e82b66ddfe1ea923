"""The built wheel: its content, and that it can share an environment with another package named `trainer`.

`coqui-tts-trainer` installs a package `trainer`. A wheel that did the same would overwrite those files when it is
installed, and delete them when it is uninstalled.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from source_files import PACKAGES, ROOT, source_files

OTHER_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "another-trainer"
version = "1.0"

[tool.setuptools]
packages = ["trainer", "trainer.utils"]
"""
OTHER_FILES = {
    "pyproject.toml": OTHER_PROJECT,
    "trainer/__init__.py": "from .utils.io import OWNER\n",
    "trainer/utils/__init__.py": "",
    "trainer/utils/io.py": "OWNER = 'the other project'\n",
}
USE_BOTH = """
import trainer, mrp_trainer, modeling_mrp, hub_cards
assert trainer.OWNER == "the other project"
print(mrp_trainer.__file__)
print(mrp_trainer.linear_kl.__module__, modeling_mrp.MRPConfig.__module__)
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command outside the repository and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def build_wheel(project: Path, destination: Path) -> Path:
    pip("wheel", project, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", destination)
    (wheel,) = destination.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this repository, built from a copy so that no build folder is left in the working tree."""
    project = tmp_path_factory.mktemp("project")
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    return build_wheel(project, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_top_level_names(names):
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGES)
    assert len(folders) == len(PACKAGES) + 1


def test_every_module_is_included_and_no_test(names):
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for file in source_files().values()
        if file.is_relative_to(ROOT / folder)
    }
    assert len(expected) > 60 and expected <= names
    assert not [name for name in names if "tests/" in name or Path(name).name.startswith(("test_", "conftest"))]


@pytest.mark.parametrize("pattern", ["recipes/*.yaml", "*.md", "sdar-*/*"])
def test_data_files_are_included(names, pattern):
    files = [file for file in (ROOT / "hub_cards").glob(pattern) if file.is_file()]
    assert files and {file.relative_to(ROOT).as_posix() for file in files} <= names


def test_citation_states_the_version_of_the_package(wheel):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == wheel.name.split("-")[1]


def test_markers_of_type_hints_are_included(names):
    assert {"mrp_trainer/py.typed", "modeling_mrp/py.typed"} <= names


def test_held_out_functions_are_included_as_references_only(wheel):
    with ZipFile(wheel) as archive:
        text = archive.read("hub_cards/sdar-tiny-code-mrp/held_out.json").decode()
    assert text.count('"sha256"') == 400 and "def " not in text


@pytest.fixture
def environment(tmp_path) -> Path:
    """A new virtual environment that contains the other project's `trainer`."""
    for name, text in OTHER_FILES.items():
        file = tmp_path / "other" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    venv.create(tmp_path / "environment", with_pip=False)
    install(tmp_path / "environment", build_wheel(tmp_path / "other", tmp_path / "other-wheel"))
    return tmp_path / "environment"


def install(environment: Path, wheel: Path) -> None:
    pip("--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel)


def share_dependencies(environment: Path) -> Path:
    """Let the environment import torch and the other dependencies of this one, after its own packages."""
    (site_packages,) = environment.glob("lib/*/site-packages")
    shared = site_packages / "shared.pth"
    shared.write_text("\n".join(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
    return shared


def test_wheel_leaves_another_package_named_trainer_alone(wheel, environment, tmp_path):
    (site_packages,) = environment.glob("lib/*/site-packages")
    before = {file: file.read_bytes() for file in site_packages.glob("trainer/**/*.py")}
    assert len(before) == 3
    install(environment, wheel)
    shared = share_dependencies(environment)
    printed = run(environment / "bin" / "python", "-c", USE_BOTH, cwd=tmp_path)
    assert printed.split() == [
        str(site_packages / "mrp_trainer" / "__init__.py"),
        "mrp_trainer.losses.linear_kl",
        "modeling_mrp.configuration_mrp",
    ]
    assert "convert" in run(environment / "bin" / "mrp", "--help", cwd=tmp_path)

    shared.unlink()  # pip must see this environment's packages only
    pip("--python", environment / "bin" / "python", "uninstall", "--yes", "mrp-diffusion")
    assert not (site_packages / "mrp_trainer").exists() and not (environment / "bin" / "mrp").exists()
    assert {file: file.read_bytes() for file in site_packages.glob("trainer/**/*.py")} == before
    imported = run(environment / "bin" / "python", "-c", "import trainer; print(trainer.OWNER)", cwd=tmp_path)
    assert imported.strip() == "the other project"
