"""What only this catches: a header that needs another one before it, a kernel with other registers or stack than
recorded, and a README whose first command fails."""
import json
import os
import re
import shlex
import subprocess

import kernels
import programs
import pytest
from conftest import ENVIRONMENT, ROOT, in_turn

HEADERS = sorted(str(path.relative_to(ROOT)) for pattern in ("0*/**/*.h", "tests/*.h")
                 for path in ROOT.glob(pattern))


@pytest.fixture(scope="module")
def compiler(build):
    """The build's compiler and flags, without precompiled headers."""
    commands = json.loads((build / "compile_commands.json").read_text())
    command = next(each["command"] for each in commands if each["file"].endswith("tests/ranks_main.cpp"))
    words = shlex.split(command)
    flags = [word for before, word in zip(words, words[1:])
             if before == "-isystem" or re.match("-(isystem|std|f|W|D)", word) and word != "-Winvalid-pch"]
    return [words[0], f"-I{ROOT}", "-DTRAIN70B_CUDA=0", *flags]


@pytest.mark.parametrize("header", in_turn(HEADERS))
def test_headers_compile_alone(header, compiler):
    # A file that includes it: of a header that is compiled itself #pragma once would be reported.
    done = subprocess.run([*compiler, "-fsyntax-only", "-x", "c++", "-"], cwd=ROOT, input=f'#include "{header}"\n',
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_registers_stack_and_blocks_per_multiprocessor(build):
    rows, same = kernels.table_of(build)
    if not same or not rows:
        pytest.skip(f"no kernels, or built by another compiler than nvcc {kernels.COMPILER}, or not for sm_90a")
    assert not kernels.differences(rows)


def test_demo_the_first_command_of_the_readme(build, tmp_path):
    if build != ROOT / "build":
        pytest.skip("the demo is tried with build/ only")
    done = subprocess.run(["bash", ROOT / "08_3d_full/demo.sh", "out", "3"], stdout=subprocess.PIPE, cwd=tmp_path,
                          stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-3000:]
    apart = re.findall(r"^ +[123] +\d\.\d{8} +\d\.\d{8} +(\S+)$", done.stdout, re.M)
    assert len(apart) == 3 and all(float(each) < 5e-6 for each in apart), done.stdout
    assert len(re.findall(r"^step +3/3  loss 5\.1185", done.stdout, re.M)) >= 6, done.stdout
    for name in ("08_loss.png", "08_memory.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize("version, option", [("mpirun (Open MPI) 4.1.4", ["--oversubscribe"]), ("HYDRA details", [])])
def test_demo_gives_options_of_open_mpi_to_open_mpi_only(version, option, tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    start = re.search(r"^shared=.*?^ranks.*?$", (ROOT / "08_3d_full/demo.sh").read_text(), re.M | re.S)[0]
    done = subprocess.run(["bash", "-euc", f"build=b\n{start}\nranks 2 x --dp 2"], env={**ENVIRONMENT, "PATH": path},
                          capture_output=True, text=True)
    assert done.stdout.split() == [*option, *"-np 2 b/bin/x --dp 2".split()], done
    monkeypatch.setitem(programs.ENVIRONMENT, "PATH", path)
    monkeypatch.setattr(programs, "open_mpi", programs.open_mpi.__wrapped__)
    assert programs.mpirun(2, "-q") == ["mpirun", *option, *["-q"] * len(option), "-np", "2"]
