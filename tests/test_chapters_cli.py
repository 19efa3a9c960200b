"""The programs of chapters 03 to 07: reference runs, models, metrics, traces of layouts in files; printed tables."""
import collections

import pytest

from conftest import ROOT, Programs, in_turn
from one_rank import comm_bytes, like_one_rank, loads_and_saves, one_rank

MODEL = "--hidden 32 --heads 4 --ffn 48 --init-std 0.1 --lr 0.001"
MODEL_07 = "--layers 2 --hidden 128 --heads 4 --kv-heads 2 --vocab 256 --seq-len 32 --global-batch 8"
# refused: ranks, flags, what is said. layouts: flags of 4 ranks, and what must be in metrics and trace. tables: ranks,
# flags, what is printed.
Chapter = collections.namedtuple("Chapter", "program model batch refused layouts tables")
CHAPTERS = {
    "03": Chapter(
        "03_zero", f"--layers 3 {MODEL}", "--seq-len 16 --global-batch 4",
        (2, "--model 405b --offload optimizer",
         ["--offload optimizer: needs", "of host memory on this node", "are available"]),
        {"--zero 0": [], "--zero 1": [], "--zero 2 --hybrid-shard 2": [],
         f"--zero 1 --offload nvme --offload-dir {ROOT}": [],
         "--zero 3 --offload all --micro-batch 1": ["dp.all_gather", "dp.reduce_scatter"]},
        (2, "--zero 3", ["stage 3", "2 m P + m G", "2 units"])),
    "04": Chapter(
        "04_tensor_parallel", f"--layers 1 --kv-heads 2 --vocab 259 {MODEL}", "--seq-len 16 --global-batch 4",
        (3, "--tp 3", ["--heads 8 is not divisible by --tp 3 (try --tp 1, 2, 4 or 8)"]),
        {"--tp 4": ["tp.all_reduce"], "--tp 4 --sequence-parallel on": ["tp.reduce_scatter", "tp.all_gather"],
         "--tp 4 --sequence-parallel on --tp-overlap on": [], "--tp 2 --dp 2 --tp-overlap on --micro-batch 1": [],
         "--dp 2 --sequence-parallel on --recompute full": []},
        (4, "--sequence-parallel on", ["tp 4, sequence", "6 all_gather, 4 reduce_scatter"])),
    "05": Chapter(
        "05_pipeline", f"--layers 4 --vocab 259 {MODEL}", "--seq-len 16 --global-batch 8",
        (3, "--pp 2", ["--pp 2: 3 ranks are not divisible by 2 (try mpirun -np 4, or --pp 1)"]),
        {"--pipeline 1f1b": ["pp.send"], "--pipeline zero-bubble --recompute full": [],
         "--pp 2 --pipeline interleaved": [], "--pp 2 --pipeline gpipe --stage-layers 1,3": [],
         "--pp 2 --pipeline dualpipe-v": []},
        (2, "--pipeline zero-bubble --pipeline-trace p.json --draw d.png",
         ["zero-bubble", "simulated from measured times", "measured (", "in flight"])),
    "06": Chapter(
        "06_context_parallel", f"--layers 1 --kv-heads 2 --vocab 259 {MODEL}", "--seq-len 32 --global-batch 4",
        (3, "--cp-algorithm ulysses --seq-len 129", ["--heads 8 and --kv-heads 4 are not divisible by 3 (try --cp 2)"]),
        {"--cp-algorithm ring": ["cp_ring.send_recv"], "--cp-algorithm zigzag --recompute full": ["cp_ring.send_recv"],
         "--cp-algorithm ulysses": [], "--cp-algorithm hybrid": [],
         "--cp-algorithm gather --recompute pointwise": ["cp_gather.all_gather", "cp_gather.reduce_scatter"],
         "--cp 2 --dp 2 --micro-batch 1": []},
        (2, "--cp-algorithm hybrid", ["hybrid 2 x 1", "GFLOP", "CPU ms", "one rank's / N"])),
    "07": Chapter(
        "07_fp8", "--layers 2 --hidden 128 --heads 4 --kv-heads 2 --ffn 256 --vocab 256 --lr 0.001",
        "--seq-len 32 --global-batch 8",
        (2, "--tp 2 --fp8-strict on --hidden 144 --heads 6 --kv-heads 2",
         ["q, k, v: 120 outputs (--hidden, --heads, --kv-heads) on a rank are not divisible by 16 (try 128)"]),
        {},  # FP8 is near one rank's: below
        (1, "--optimizer adamw8bit", ["current, adamw8bit", "all-gathers", "reductions"])),
}


@pytest.fixture(scope="module")
def trained(module_run):
    """trained(number): runs programs in a folder of the chapter's own, which has the run on one rank."""
    def in_folder(number):
        run = Programs(module_run.binaries, module_run.folder / number)
        if not run.folder.exists():
            run.folder.mkdir()
            one_rank(run, CHAPTERS[number].model, CHAPTERS[number].batch)
        return run
    return in_folder


@pytest.mark.parametrize("number", CHAPTERS)
def test_refused(run, number):
    """Real ranks; most of what is refused is in refusals.cpp."""
    ranks, flags, parts = CHAPTERS[number].refused
    run.refused(CHAPTERS[number].program, "--steps 1 --tables off --metrics m.jsonl", flags, says=parts, ranks=ranks)


LAYOUTS = [(number, flags) for number, row in CHAPTERS.items() for flags in row.layouts]


@pytest.mark.parametrize("number, flags", in_turn(LAYOUTS, 2))
def test_layout(trained, number, flags):
    run, row = trained(number), CHAPTERS[number]
    done = like_one_rank(run, row.program, row.model, row.batch, flags, "--tables off --memory-timeline t.csv")
    trace = (run.folder / "t.json").read_text()
    for name in row.layouts[flags]:
        assert name in comm_bytes(done.events()[0]) and f'"{name}"' in trace, f"no {name}\n{done}"
    columns = (run.folder / "t.csv").read_text().splitlines()[0]
    assert columns.endswith("total,host,disk" if "nvme" in flags else "total,host" if "offload" in flags
                            else "workspace,total"), columns
    for kind, flag in ("host", "offload"), ("disk", "nvme"):
        assert (kind in done.events()[0]["memory"]) == (flag in flags), done.events()[0]


@pytest.mark.parametrize("number", CHAPTERS)
def test_tables(trained, number):
    """The tables, in a run that loads one rank's model and saves it."""
    run, row = trained(number), CHAPTERS[number]
    ranks, flags, words = row.tables
    loads_and_saves(run, row.program, row.batch, flags, ranks=ranks).says(*words, where="out")
    if "p.json" in flags:
        assert '"name":"W7"' in (run.folder / "p.json").read_text()
        assert (run.folder / "d.png").read_bytes()[1:4] == b"PNG"


def test_03_holds_no_more_units_in_a_deeper_model(trained):
    """Stage 3 holds no more units at once in a deeper model."""
    run, row = trained("03"), CHAPTERS["03"]
    done = like_one_rank(run, row.program, row.model, row.batch, "--zero 3 --tables off")
    assert not any("split" in name for step in done.events() for name in step["comm_bytes"]), done
    few = peak(done)  # its workspace is gathered units, which a closure would keep from being freed
    many = peak(run(row.program, f"--layers 6 {MODEL}", row.batch, "--zero 3 --steps 2 --tables off --metrics m.jsonl",
                    ranks=4))
    assert few["workspace"] == many["workspace"] > 0, (few, many)


def peak(done):
    return done.events()[-1]["memory"]["peak"]


def trained_07(run, flags, program="07_fp8", ranks=1):
    """Four steps of chapter 07's model."""
    tables = "--tables off" if program == "07_fp8" else ""
    return run(program, MODEL_07, "--ffn 256 --lr 0.001 --steps 4 --metrics m.jsonl", tables, flags, ranks=ranks)


def losses(done):
    return [step["loss"] for step in done.events()]


def test_07_recipes(run):
    one = losses(trained_07(run, "", "01_single_gpu"))
    assert losses(trained_07(run, "--fp8 off")) == one  # bit for bit
    found = {}
    for recipe in ("current", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "int8"):
        found[recipe] = losses(trained_07(run, f"--fp8 {recipe}").says("8 of 8 linear layers", where="out"))
        assert len(found[recipe]) == len(one) == 4 and found[recipe] != one, recipe
    assert found["delayed"][0] == found["current"][0] and found["delayed"][-1] != found["current"][-1], found


def test_07_on_two_ranks(run):
    one = losses(trained_07(run, "", "01_single_gpu"))
    gathered = {}
    layouts = ["--zero 3 --dtype bf16 --fp8 off", "--zero 3 --dtype bf16 --optimizer adamw8bit", "--zero 3", "--tp 2",
               "--tp 2 --fp8 blockwise"]
    for flags in layouts:
        done = trained_07(run, f"{flags} --comm-check on", ranks=2)
        two = losses(done)
        assert len(two) == len(one) == 4 and all(abs(a - b) <= 0.05 for a, b in zip(two, one)), (flags, two, one)
        gathered[flags] = done.events()[-1]["comm_bytes"].get("dp.all_gather")
    off, on, *_ = gathered.values()
    matrices = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256)  # elements of the two blocks
    saved = 2 * matrices / 2  # forward and backward, half of it from the other rank: a byte of each element
    norms = 2 * 2 * 128 * 2  # of the blocks, which travel beside the codes
    assert saved - 2 * norms <= off - on <= saved, (off, on, saved)


@pytest.mark.parametrize("flags", in_turn(["--fp8 off --dtype fp64"], parts=2))  # its table of errors takes long
def test_07_table_of_bytes(run, flags):
    done = run("07_fp8", MODEL_07, "--ffn 256 --steps 1", flags)
    moments = 16 * (2 * 256 * 128 + 128 + 2 * (2 * 128 + 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256))
    assert done.out.count(f" {moments} ") == 2, done  # one row, and the formula below it


def test_07_names_a_layer_that_stays_once(run):
    done = run("07_fp8", MODEL_07, "--ffn 200 --steps 1 --tables off").says("6 of 8 linear layers", where="out")
    line = "stays in fp32: down: 200 inputs (--ffn) on a rank are not divisible by 16 (try 208)"
    assert done.out.count(line) == 1, done


def test_07_says_that_a_run_breaks(run):
    run("07_fp8", MODEL_07, "--ffn 256 --lr 1e30 --clip 0 --warmup-steps 0 --steps 9 --tables off",
        code=1).says("first non-finite parameter")
