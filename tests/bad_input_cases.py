"""The cases of bad_input.py, most of them generated: from the flags that each --help lists, from a good Hugging Face
folder, good shards and a good reference run with one thing wrong."""
import dataclasses
import os
import subprocess

from bad_input_common import FIRST, GENTLE, SHAPE, TEXT, words_of, write_text
from bad_input_files import compare_cases, data_cases
from bad_input_flags import flag_cases, size_cases
from bad_input_hf import hf_cases
from bad_input_layouts import layout_cases, plan_cases, schedule_cases
from bad_input_outputs import can_mount, disk_cases, environment_cases, output_cases, simulate_cases, stream_cases


def all_cases(binaries, above, Case):
    """(cases, lines on what is skipped). `above`: a folder for the good files that cases copy."""
    cases, skipped = [], []

    def add(group, name, program, given, expected, setup=write_text, without=(), words=None, more=(), trace=None,
            deleted=False, **fields):
        arguments = words if words is not None else words_of(program, list(given) + list(more), without)
        if trace:
            arguments = [trace if before == "--trace" else word for before, word in zip([""] + arguments, arguments)]
        if deleted:
            arguments = [str(above / word) if word == "text.txt" else word for word in arguments]
        case = Case(group, name, program, arguments, expected, setup or write_text, gone=deleted, **fields)
        cases.append(case)

    (above / "text.txt").write_text(TEXT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for flag, steps in (("--save-hf", "0"), ("--save-reference", "2")):
        subprocess.run([os.path.join(binaries, FIRST), *[w for pair in SHAPE.items() for w in pair], "--data",
            "text.txt", "--seq-len", "16",
                        "--global-batch", "2", "--steps", steps, flag, flag[2:]], cwd=above, env=environment,
                        check=True, stdout=subprocess.DEVNULL)
    flag_cases(add, binaries)
    size_cases(add)
    layout_cases(add)
    schedule_cases(add)
    plan_cases(add, binaries)
    data_cases(add)
    hf_cases(add, above / "save-hf")
    compare_cases(add, above / "save-reference")
    simulate_cases(add)
    output_cases(add, above / "save-hf", binaries)
    stream_cases(add, binaries)
    environment_cases(add)
    if can_mount():
        disk_cases(add)
    else:
        skipped.append("full and read-only disks: this user cannot mount a tmpfs")
    fake = ["--comm", "fake", "--fake-world", "2"]
    again = [case for case in cases
             if case.program not in (FIRST, "compare", "schedule", "plan") and case.ranks == 1 and not case.streams
             and (case.arguments[-6:-2] == fake or "--comm" not in case.arguments)
             and "--dry-run" not in case.arguments and "--simulate" not in case.arguments]
    for case in again[::12]:
        at = len(case.arguments) - 6
        arguments = case.arguments
        if arguments[at:at + 4] == fake:
            arguments = arguments[:at] + arguments[at + 4:]
        cases.append(dataclasses.replace(case, group="on two ranks", arguments=arguments, ranks=2))
    for case in cases:
        if case.ranks > 1:
            case.limit = max(case.limit, GENTLE)
    return cases, skipped
