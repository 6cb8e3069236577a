"""The wheel works in an environment that has nothing else but what the wheel says it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest

from pw.core import installed
from pw.core.errors import Error
from tests.stages.programs import ROOT

pytestmark = pytest.mark.processes

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def run(
    *command: str | Path, cwd: Path, fine: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that inherits no path to this checkout."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [os.fspath(word) for word in command],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not fine or done.returncode == 0, done.stdout + done.stderr
    return done


def needed(distribution: str, found: dict[str, metadata.Distribution]) -> None:
    """Collect a distribution and all that it requires, without extras."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    if name in found:
        return
    found[name] = metadata.distribution(distribution)
    for requirement in found[name].requires or []:
        marker = requirement.partition(";")[2]
        if "extra" not in marker and applies(marker):
            needed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], found)


def applies(marker: str) -> bool:
    from pip._vendor.packaging.markers import Marker

    return not marker.strip() or Marker(marker).evaluate()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment with the wheel; its dependencies are links to ours."""
    folder = tmp_path_factory.mktemp("wheel")
    source = (
        folder / "source"
    )  # a build leaves files behind, and takes what an earlier one has left
    shutil.copytree(ROOT / "pw", source / "pw", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    run(*PIP, "wheel", *build, cwd=folder)
    (wheel,) = folder.glob("openpathways-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    clean = folder / "venv" / "bin" / "python"
    run(
        *PIP,
        "--python",
        clean,
        "install",
        "--no-compile",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (installed,) = metadata.distributions(name="openpathways", path=[str(packages)])
    found: dict[str, metadata.Distribution] = {"openpathways": installed}
    for requirement in installed.requires or []:
        if "extra ==" not in requirement:
            needed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], found)
    ours = Path(sysconfig.get_paths()["purelib"])
    for distribution in list(found.values())[1:]:
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(ours / top)
    return clean


@pytest.mark.long
def test_the_quickstart_runs_where_the_wheel_is_installed(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(QUICKSTART.read_text())
    done = run(python, script, cwd=tmp_path)
    assert done.stdout.startswith("(array([3., 5.]")
    where = run(python, "-c", "import pw; print(pw.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(python.parent.parent))
    assert str(ROOT) not in where


def test_the_commands_are_installed(python: Path, tmp_path: Path) -> None:
    said = run(python.parent / "pw", "version", cwd=tmp_path).stdout
    asks = "from importlib.metadata import version; print(version('openpathways'))"
    version = run(python, "-c", asks, cwd=tmp_path).stdout.strip()
    assert said.startswith(f"pw {version} with jax ")
    for command in ("pw-controller", "pw-worker"):
        assert "--help" in run(python.parent / command, "--help", cwd=tmp_path).stdout


def test_make_wheel_installs_only_the_build_backend_as_it_is_locked() -> None:
    commands = run("make", "--dry-run", "--always-make", "wheel", cwd=ROOT).stdout
    assert ".venv/" not in commands
    (locked,) = re.findall(r"^sed -n (?:.*) requirements.lock", commands, re.M)
    chosen = run("bash", "-c", locked, cwd=ROOT).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [re.split(r"\W", one)[0] for one in project["build-system"]["requires"]]
    assert re.findall(r"^(\w+)==", chosen, re.M) == names
    assert "--hash=sha256:" in chosen


def dist_info(folder: Path, name: str, version: str) -> str:
    """A folder for PYTHONPATH in which a distribution seems to be installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), str(ROOT)])


def bounds() -> tuple[str, str]:
    """The lowest and the highest release of jax that pyproject.toml lets pip install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = re.findall(r"^jax>=([\d.]+),<=([\d.]+)$", "\n".join(project["dependencies"]), re.M)
    return bounds


def after(release: str) -> str:
    first, _, last = release.rpartition(".")
    return f"{first}.{int(last) + 1}"


@pytest.mark.parametrize(
    ("jax", "jaxlib", "installs"),
    [
        ("0.4.1", "0.4.1", bounds()[1]),
        (after(bounds()[1]), after(bounds()[1]), bounds()[1]),
        (f"{bounds()[1]}.dev3", f"{bounds()[1]}.dev3", bounds()[1]),
        (bounds()[0], bounds()[1], bounds()[0]),
        (bounds()[0], bounds()[0], ""),
        (bounds()[1], bounds()[1], ""),
    ],
)
def test_another_jax_is_refused_with_the_command_that_helps(
    tmp_path: Path, jax: str, jaxlib: str, installs: str
) -> None:
    dist_info(tmp_path / "other", "jax", jax)
    path = dist_info(tmp_path / "other", "jaxlib", jaxlib)
    attempt = "try:\n    installed.check()\nexcept Exception as error:\n    print(error)"
    script = f"from pw.core import installed\n{attempt}"
    said = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=path).stdout
    if not installs:
        assert not said
        return
    lowest, highest = bounds()
    assert f"works with jax {lowest} to {highest} and a jaxlib of the same version" in said
    assert f"has jax {jax} and jaxlib {jaxlib}; run: " in said
    assert said.endswith(f"pip install jax=={installs} jaxlib=={installs}\n")


def test_the_first_use_of_pw_refuses_another_jax(tmp_path: Path) -> None:
    path = dist_info(tmp_path / "old", "jax", "0.4.1")
    script = "import pw\ntry:\n    pw.jit\nexcept pw.VersionMismatch as error:\n    print(error)"
    said = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=path).stdout
    assert "this environment has jax 0.4.1" in said


def test_the_window_of_the_installed_package_is_that_of_the_project() -> None:
    assert installed.window() == bounds()


def test_each_end_of_the_window_has_a_lock_file() -> None:
    lowest, highest = bounds()
    (newest,) = re.findall(r"^jax==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert newest == highest
    assert (ROOT / f"requirements-jax-{lowest}.lock").exists()
    for path in ROOT.glob("requirements-jax-*.lock"):
        (release,) = re.findall(r"^requirements-jax-([\d.]+)\.lock$", path.name)
        assert re.findall(r"^([a-z]+)==([\d.]+)", path.read_text(), re.M) == [
            ("jax", release),
            ("jaxlib", release),
        ]
        numbers = [[int(n) for n in text.split(".")] for text in (lowest, release, highest)]
        assert numbers == sorted(numbers)


def test_the_files_of_the_sample_exist() -> None:
    names = (ROOT / "tests" / "other_jax.txt").read_text().split()
    assert names
    assert not [name for name in names if not (ROOT / name).is_file()]


def test_an_error_about_a_missing_extra_names_packages_of_the_index() -> None:
    with pytest.raises(Error, match=r"absent_module is missing; run: pip install hpack protobuf$"):
        installed.check_extra("jax", "absent_module")


def test_the_other_project_called_pw_is_noticed(tmp_path: Path) -> None:
    path = dist_info(tmp_path / "other", "pw", "0.14.1")
    script = "import pw; pw.jit; pw.put"
    said = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=path).stderr
    assert said.count("UserWarning") == 1
    assert "pip uninstall pw" in said
    assert "install openpathways as before, with --force-reinstall --no-deps" in said
