#!/usr/bin/env python3
"""Registers, stack and shared memory of every CUDA kernel, and how many of its blocks fit an SM of an H100 or H200.

    tests/kernels.py BUILD            compares what nvcc made in BUILD with docs/results/kernels.csv
    tests/kernels.py BUILD --write    writes that file
    tests/kernels.py BUILD --all FILE.csv    registers, stack and static shared memory for each architecture in BUILD

It reads the objects: no GPU, no disassembler. Another compiler than the file's allocates otherwise: then the table is
printed and nothing is compared. test_builds.py does the same.
"""
import csv
import pathlib
import re
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/results/kernels.csv"
COLUMNS = ["kernel", "threads", "registers", "stack", "static_shared", "dynamic_shared", "blocks_per_sm"]
COMPILER = "release 13.0"

# Threads of a block where it is not 256 (Grid in cuda.cuh) and the kernel has no __launch_bounds__; bytes of dynamic
# shared memory, for a head size of 128 where the kernel takes any, and rows of 4,096.
THREADS = {"merge_attention_kernel": 128, "split_rope_kernel": 128, "cross_entropy_kernel": 1024}
DYNAMIC = [(r"forward_kernel<(64|128)", lambda D: (128 + 2 * 64) * (int(D) + 8) * 2),
           (r"backward_q_kernel<(64|128)", lambda D: 2 * (128 + 32) * (int(D) + 8) * 2),
           (r"backward_kv_kernel<(64|128)", lambda D: 2 * 2 * 64 * (int(D) + 8) * 2),
           (r"forward_kernel<(\w)", lambda _: (32 * 128 + 2 * 32 * 129) * 4),
           (r"backward_(?:q|kv)_kernel<(\w)", lambda _: (2 * 32 * 128 + 2 * 32 * 129) * 4),
           (r"(rmsnorm)_backward_kernel", lambda _: 4096 * 4), (r"(head_norm)_backward_kernel", lambda _: 8 * 2 * 128 * 4)]


def blocks_per_sm(threads, registers, shared):
    """Of compute capability 9.0: four parts with 16,384 registers each, handed out to warps in units of 256; 64 warps,
    32 blocks; 228 KiB of shared memory, of which each block takes 1 KiB more than it asks for."""
    warps = (threads + 31) // 32
    of_warp = (registers * 32 + 255) // 256 * 256
    return min(4 * (16384 // of_warp) // warps, 64 // warps, 32, (228 << 10) // (shared + 1024))


def attributes(section):
    """(attribute, its bytes) of a .nv.info section."""
    at = 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # `size` bytes follow; otherwise `size` is the value
            yield attribute, section[at:at + size]
            at += size


def kernels_of(cubin, reserved=1024):
    """{mangled name: [threads or None, registers, stack, static shared memory]} of an ELF file for the GPU."""
    offset, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3a)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    text = lambda table, at: cubin[headers[table][4] + at:].split(b"\0", 1)[0].decode()
    sections = {text(names, h[0]): h for h in headers}
    body = lambda h: cubin[h[4]:h[4] + h[5]]
    symbols = sections[".symtab"]
    name_of = lambda i: text(symbols[6], struct.unpack_from("<I", cubin, symbols[4] + 24 * i)[0])
    found = {}
    for attribute, value in attributes(body(sections[".nv.info"])):
        if attribute in (0x2f, 0x11):  # registers; stack: spilled registers, and arrays that are indexed at run time
            symbol, number = struct.unpack("<II", value)
            found.setdefault(name_of(symbol), [None, 0, 0, 0])[1 if attribute == 0x2f else 2] = number
    found = {name: row for name, row in found.items() if ".nv.info." + name in sections}  # not functions that they call
    for name, row in found.items():
        for attribute, value in attributes(body(sections[".nv.info." + name])):
            if attribute == 5:  # __launch_bounds__
                row[0] = struct.unpack("<III", value)[0]
        if ".nv.shared." + name in sections:
            row[3] = sections[".nv.shared." + name][5] - reserved  # the block's own KiB, which blocks_per_sm() counts
    return found


def objects(build, architecture):
    """{kernel: [threads or None, registers, stack, static shared memory]}, and whether all are of COMPILER."""
    found, same = {}, True
    for path in sorted(build.glob("CMakeFiles/cuda_*.dir/**/*.o")):
        data = path.read_bytes()
        begins = [m.start() for m in re.finditer(rb"\x7fELF\x02.{11}..\xbe\0", data, re.S)]  # 190: a GPU's
        for begin, end in zip(begins, begins[1:] + [len(data)]):
            cubin = data[begin:end]
            if f"-arch {architecture} ".encode() in cubin.replace(b"\0", b" "):
                found |= kernels_of(cubin, 0 if architecture in ("sm_80", "sm_89") else 1024)
                same &= COMPILER.encode() in cubin
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True).stdout
    rows = {}
    for name, row in zip(names.splitlines(), found.values()):
        name = re.sub(r"train70b::|cuda::|\(anonymous namespace\)::|^void ", "", name).replace("__nv_bfloat16", "bf16")
        rows[re.match(r"\w+(<[^()]*>)?", name.replace("(bool)1", "true").replace("(bool)0", "false"))[0]] = row
    return rows, same


def table_of(build):
    """The table's rows, those of sm_90a, and whether all are of COMPILER."""
    found, same = objects(build, "sm_90a")
    rows = []
    for name, (threads, registers, stack, static) in found.items():
        threads = threads or THREADS.get(name.split("<")[0], 256)
        dynamic = next((bytes_of(m[1]) for pattern, bytes_of in DYNAMIC if (m := re.match(pattern, name))), 0)
        rows.append(tuple(map(str, (name, threads, registers, stack, static, dynamic,
                                    blocks_per_sm(threads, registers, static + dynamic)))))
    return sorted(rows), same


def differences(rows):
    with open(TABLE, newline="", encoding="utf-8") as file:
        expected = [tuple(row) for row in csv.reader(file)][1:]
    return [f"{'expected:' if row in expected else 'built:   '} {', '.join(row)}"
            for row in sorted({*expected} ^ {*rows})]


def main():
    build = pathlib.Path(sys.argv[1])
    if "--all" in sys.argv:
        of = {name: objects(build, name)[0] for name in ("sm_80", "sm_89", "sm_90a", "sm_100")}
        head = ["kernel", *(f"{name} {what}" for name in of for what in ("registers", "stack", "shared"))]
        with open(sys.argv[3], "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [head, *([name, *(x for each in of.values() for x in each.get(name, [""] * 4)[1:])]
                         for name in sorted({*of["sm_80"], *of["sm_90a"]}))])
        return
    rows, same = table_of(build)
    if not rows:
        sys.exit(f"{sys.argv[1]} has no CUDA objects: build all targets with nvcc")
    if "--write" in sys.argv:
        with open(TABLE, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        return
    print("\n".join(differences(rows) if same else (", ".join(row) for row in [COLUMNS, *rows])))
    print(f"{len(rows)} kernels, {sum(row[3] != '0' for row in rows)} with a stack; compiled " +
          ("as the file's" if same else f"by another compiler than nvcc {COMPILER}, or not for sm_90a"))


if __name__ == "__main__":
    main()
