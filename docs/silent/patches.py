"""The list of patches, patches.txt, made in a clone of HEAD in which programs are built."""

import contextlib
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = "08_3d_full"


class Refused(Exception):
    """One line for the user; exit code 2."""


class Failed(Exception):
    """A patch could not be built."""


def read(path):
    """{bug: [file, lines before, lines after] of each block}."""
    listed = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        key, _, value = line.partition(" ")
        blocks = next(reversed(listed.values()), None)
        if not line or line[0] == "#":
            continue
        if key == "bug" and value not in listed:
            listed[value] = []
        elif key == "file" and blocks is not None:
            blocks.append([value, [], []])
        elif line[0] in " -+" and blocks:
            for sign, lines in zip("-+", blocks[-1][1:]):
                lines += [line[1:]] * (line[0] in " " + sign)
        else:
            raise Refused(f"{path.name}, line {number}: not understood: {line}")
    return listed


def changed(bug, blocks, root):
    """{file: its text with the bug} in the sources below `root`; refused where a block does not fit them."""
    texts = {}
    for file, before, after in blocks:
        if not (root / file).is_file():
            raise Refused(f"{bug}: there is no {file}")
        lines = texts.get(file, (root / file).read_text()).split("\n")
        places = [at for at in range(len(lines)) if lines[at:at + len(before)] == before]
        if len(places) != 1 or before == after:
            raise Refused(f"{bug}: {file} has its block {len(places)} times, not once, or it changes nothing")
        lines[places[0]:places[0] + len(before)] = after
        texts[file] = "\n".join(lines)
    return texts


def run(what, *command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    if done.returncode:
        lines = done.stdout.splitlines() or [f"exit code {done.returncode}"]
        raise Failed(f"{what}: " + next((line for line in lines if re.search(r"\berror\b", line, re.I)), lines[-1]))


class Work:
    """A clone of HEAD and its build folder, which the next patch uses again, and the next time."""

    def __init__(self, folder):
        self.source, self.build = folder / "source", folder / "build"
        if not self.source.exists():
            run("git clone", "git", "clone", "--quiet", "--no-checkout", ROOT, self.source)
        run("git fetch", "git", "-C", self.source, "fetch", "--quiet", ROOT, "HEAD")
        run("git checkout", "git", "-C", self.source, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        generator = [] if (self.build / "CMakeCache.txt").exists() else ["-G", "Ninja"]
        run("cmake", "cmake", "-S", self.source, "-B", self.build, "-DTRAIN70B_CUDA=OFF", *generator)

    def program(self, texts, to):
        """The program with these texts of files, which are as they were when this ends, however it ends."""
        with contextlib.ExitStack() as stack:
            for file, text in texts.items():
                # With the time of now: the next build compiles them again.
                stack.callback((self.source / file).write_text, (self.source / file).read_text())
                (self.source / file).write_text(text)
            run(f"{to.name} does not build", "cmake", "--build", self.build, "--target", TARGET)
            shutil.copy(self.build / "bin" / TARGET, to)
