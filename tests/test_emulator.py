"""What only this catches: an emulated GPU (tests/emulate) that lets a mistake pass: kernels and calls with one each
(mistakes.cu), which must be named with their place, and CUDA that its translator must refuse."""
import re
import signal
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT

EMULATE = ROOT / "tests/emulate"
ABORTS, SEGFAULTS, REFUSED = -signal.SIGABRT, -signal.SIGSEGV, 3  # 3: CUDA's error, which the program sees
ORDERS = ("forward", "reverse", "random")
MISTAKES = [  # mistake, exit code, what it says
    ("none", 0, "640"),
    ("bound", ABORTS, "in write_kernel, block 0 0 0, thread 0 0 0"),
    ("released", ABORTS, "0 bytes into 256 bytes of memory of GPU 0, already released"),
    ("released twice", ABORTS, "cudaFreeAsync of what is no live allocation of this GPU"),
    ("host pointer", ABORTS, "memory of the host that is not pinned"),
    ("host touches", SEGFAULTS, "the host touches"),
    ("alignment", ABORTS, "the address is not a multiple of that"),
    ("race", ABORTS, "race in shared memory, no barrier between"),
    ("race of blocks", ABORTS, "race in global memory, no barrier between"),
    ("copy out of bounds", ABORTS, "reads 4 bytes: 252 bytes into 252 bytes of memory of GPU 0"),
    ("shared bound", ABORTS, "not declared in shared memory"),
    ("divergent barriers", ABORTS, "divergent barriers"),
    ("divergent warp", ABORTS, "divergent warp"),
    ("no dynamic memory", ABORTS, "the launch asks for no dynamic shared memory"),
    ("shared without asking", REFUSED, "launch of dynamic_kernel: more than 48 KiB of shared memory must be allowed"),
    ("shared beside static arrays", ABORTS, "more shared memory, static arrays included, than a block has"),
    ("empty grid", REFUSED, "launch of add_kernel: an empty grid (grid 0 1 1, block 64 1 1"),
    ("block too large", REFUSED, "a block has 1 to 1024 threads"),
    ("block too deep", REFUSED, "launch of add_kernel: blockDim.z is at most 64"),
    ("launch bound", ABORTS, "a block of 128 threads of a kernel that is compiled for 64"),
    ("allocated on another stream", ABORTS, "which its stream has not allocated yet: an event is missing"),
    ("first collectives", 0, ""),
    ("first collectives in opposite order", ABORTS, "connects in its first ncclAllReduce(1 fp32, sum), and has waited"),
    ("default stream", ABORTS, "not a stream"),
    ("other GPU", REFUSED, "the stream belongs to another GPU than the current one"),
    ("copy bound", REFUSED, "cudaMemcpyAsync: 0 bytes into 32 bytes of memory of GPU 0, 256 bytes to copy"),
    ("copy direction", REFUSED, "the direction is not that of the pointers")]
IN_EVERY_ORDER = [
    ("race of tiles", ABORTS, "race in shared memory, no barrier between"),
    ("race of bytes", ABORTS, "race in shared memory, no barrier between"),
    ("copy", 0, ""),
    ("copy without barrier", ABORTS, "race in shared memory, no barrier between"),
    ("copy over what is read", ABORTS, "race in shared memory, no barrier between")]
# mistake, text of the line that it names, what is said beside the line; `|`: the line's place
AT_LINES = [
    ("bound", "x[at] = 1", "illegal access: | writes 4 bytes: 256 bytes into 256 bytes of memory of GPU 0"),
    ("race", "tile[(threadIdx", "|"),
    ("copy not waited for", "may be on its way", "| reads 4 bytes: a thread copies there and has not waited for"),
    ("copy forgotten", "cp.async.ca", "a thread ends and has not waited for its copy: |")]


def mistake(binaries, name, code, says, order="random", **settings):
    program = binaries / "emulated_mistakes"
    if not program.exists():
        pytest.skip("no emulated GPU was built: it needs the headers of CUDA")
    done = subprocess.run([program, name], capture_output=True, text=True,
                          env={"EMULATE_RACES": "1", "EMULATE_GPUS": "2", "EMULATE_ORDER": order,
                               "EMULATE_CONNECT_S": "1", **settings})
    assert done.returncode == code and says in done.stdout + done.stderr, done


@pytest.mark.parametrize("name, code, says", MISTAKES)
def test_mistake(name, code, says, binaries):
    mistake(binaries, name, code, says)


@pytest.mark.parametrize("gpu, kib", [(80, 163), (89, 99), (90, 227), (100, 227)])
def test_shared_memory_of_a_block(gpu, kib, binaries):
    code, says = (0, "") if kib > 164 else (REFUSED, f"cudaFuncSetAttribute: at most {kib} KiB")
    mistake(binaries, "shared memory of another GPU", code, says, EMULATE_CAPABILITY=str(gpu))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name, code, says", IN_EVERY_ORDER)
def test_mistake_in_every_order(name, code, says, order, binaries):
    mistake(binaries, name, code, says, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name, text, says", AT_LINES)
def test_mistake_is_named_with_its_line(name, text, says, order, binaries):
    lines = (EMULATE / "mistakes.cu").read_text().splitlines()
    line = next(number for number, line in enumerate(lines, 1) if text in line)
    mistake(binaries, name, ABORTS, says.replace("|", f"tests/emulate/mistakes.cu:{line}"), order)


def case(binaries, chapter, name, code, *says, ranks=1, **settings):
    program = binaries / f"emulated_test_{chapter}"
    if not program.exists():
        pytest.skip("no emulated GPU was built: it needs the headers of CUDA")
    # One GPU: each rank has its own and sees no other.
    own = settings.get("EMULATE_GPUS") == "1" and "EMULATE_FIRST_GPU" not in settings
    first = "EMULATE_FIRST_GPU=$OMPI_COMM_WORLD_RANK " if own else ""
    start = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*start, "bash", "-c", f"{first}exec {program} -tc='{name}'"], capture_output=True, text=True,
                          env={**ENVIRONMENT, "EMULATE_GPUS": str(ranks), **settings})
    assert done.returncode == code and all(each in done.stdout + done.stderr for each in says), done
    return done


@pytest.mark.parametrize("settings, code, says", [
    ({"EMULATE_START_S": "2", "EMULATE_NCCL_VERSION": "22203"}, 0,
     ["comm: NCCL 2.22.3; its kernels take up to 16 of 132 multiprocessors", "comm: --comm-streams one, because NCCL"]),
    ({"EMULATE_GPUS": "1"}, 0, ["each rank sees only its own GPU"]),
    ({"NCCL_HOSTID": "one", "EMULATE_GPUS": "1", "EMULATE_FIRST_GPU": "0"}, 1, ["Duplicate GPU detected: rank"])])
def test_two_ranks_connect(settings, code, says, binaries):
    case(binaries, "02", "connect*", code, *says, ranks=2, TRAIN70B_TEST_TIMEOUT="1", **settings)


def test_reads_of_attention_and_swiglu_are_coalesced_and_without_bank_conflicts(binaries):
    done = case(binaries, "01", "cuda: attention and its*plain*,cuda: SwiGLU*", 0, EMULATE_STATS="1",
                TRAIN70B_TEST_SLICE="3")  # the bounds are for its shapes
    ours = r"emulate: (swiglu\w+<.*>|\w+ward\w*_kernel<(?:64|128).*>)"
    threads = re.findall(ours + r" .* (\d+) threads", done.stderr)
    reads = re.findall(ours + r": (global|shared) reads, \d+ by warps: (\d+) \w+, (\d+) at best", done.stderr)
    assert len(threads) == 10 and len(reads) == 16 and all(int(number) >= 128 for _, number in threads)
    for name, memory, taken, best in reads:
        assert int(taken) <= (1.1 if memory == "global" else 1) * int(best), name


def test_reads_of_products_by_hand_are_coalesced_and_without_bank_conflicts_in_the_other_orientation(binaries):
    said = case(binaries, "01", "*X^T Y", 0, EMULATE_STATS="1").stderr
    reads = re.findall(r"emulate: (\w+)_kernel<.*>: \w+ reads, \d+ by warps: (\d+) \w+, (\d+) at best", said)
    assert len(reads) == 6 and all(taken == best for _, taken, best in reads), reads


@pytest.mark.parametrize("gpu", [89, 100])
def test_the_fp8_recipes_that_a_run_names_are_those_that_work(gpu, binaries):
    case(binaries, "07", "the tensor cores*", 0, "Status: SUCCESS", EMULATE_CAPABILITY=str(gpu))


@pytest.mark.parametrize("text, says", [
    ("__global__ void f(float* x) { __shared__ float a[2][3], b; x[0] = expf(x[1]); __syncthreads(); }", ""),
    ("__global__ void f() { __shared__ float a[2] = {}; }", "in.cu:2: __shared__"),
    ('__device__ void f() { asm volatile("wgmma.fence.sync.aligned;" :: ); }', "PTX instruction wgmma.fence.sync"),
    ('__device__ void f() { asm("nop;"); }', "in.cu:2: asm"),
    ("void f() { k<<<1, 2>>>(); }", "a launch without grid, block, shared memory and stream"),
    ("__device__ int f(int x) { return __brev(x); }", "in.cu:2: __brev"),
    ("__device__ float f(float x) { return powf(x, 2); }", "the function powf")])
def test_translator_refuses_what_it_does_not_know(text, says, tmp_path):
    (tmp_path / "in.cu").write_text(f"// a comment with <<< and __shared__ and asm\n{text}\n")
    done = subprocess.run([sys.executable, EMULATE / "transform.py", "in.cu", tmp_path / "in.cu", tmp_path / "out.cpp"],
                          capture_output=True, text=True)
    assert done.returncode == bool(says) and says in done.stderr, done


def test_counts_of_the_products_by_hand_are_those_of_the_lesson(binaries):
    program = next((each for name in ("emulated_test_01", "test_01") if (each := binaries / name).exists()))
    said = subprocess.run([program, "-tc=*three of them*"], capture_output=True, text=True,
                          env={"EMULATE_STATS": "1"}).stderr
    found = re.findall(r"emulate: (\w+)_kernel<.*>: (\w+ reads), \d+ by warps: (\d+) \w+, (\d+) at best", said)
    counts = {(kernel, what): int(taken) for kernel, what, taken, _ in found}
    assert not [each for each in found if each[1] == "shared reads" and each[2] != each[3]]  # no bank conflicts
    if not counts:
        pytest.skip("no emulated GPU was built: it needs the headers of CUDA")
    lesson = (ROOT / "01_single_gpu/REFERENCE.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)`(?:, bf16)? \|[^|]*\|[^|]*\| ([\d,]+) \| ([\d,–]+) \| (\d+), (\w+)", lesson, re.M)
    assert [name for name, *_ in rows] == ["naive", "tiled", "registers", "mma"]
    table = (ROOT / "docs/results/kernels.csv").read_text("utf-8")
    for name, *taken, registers, shared in rows:
        of = "bf16, MmaTile<true>, MmaTile<true> " if name == "mma" else "float, float"
        csv = re.search(rf'"{name}_kernel<{of}>",\d+,(\d+),0,(\d+),', table)
        assert (csv[1], str(int(csv[2]) >> 10)) == (registers, shared.replace("none", "0")), name
        assert taken == [f"{counts[name, what]:,}" if (name, what) in counts else "–"
                         for what in ("global reads", "shared reads")], name
