"""What starts the programs: launchers of other MPIs or of none, as their variables tell, and the cores that ranks have."""
import os
import re

import pytest

from conftest import in_turn

CORES = sorted(os.sched_getaffinity(0))
SHAPE = ("--layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --global-batch 2 --steps 1 --tables off").split()
DRY = "--comm fake --fake-world 4 --dp 4 --dry-run --layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16".split()


def launched(launcher, ranks, rank):
    """What each sets in one of its processes, of what a program or an MPI reads: torchrun of PyTorch 1.13, hydra of
    MPICH 4.0, srun of Slurm 22.05 with --mpi=none and pmi2, mpirun of Open MPI 4.1."""
    step = {"SLURM_JOB_ID": 1, "SLURM_JOBID": 1, "SLURM_NODELIST": "localhost", "SLURM_STEP_ID": 0, "SLURM_STEPID": 0,
            "SLURM_NTASKS": ranks, "SLURM_STEP_NUM_TASKS": ranks, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    pmi = {"PMI_SIZE": ranks, "PMI_RANK": rank}
    return {name: str(value) for name, value in {
        "torchrun": {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                     "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1},
        "mpiexec": {**pmi, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": ranks},
        "Open MPI's mpirun": {"OMPI_COMM_WORLD_SIZE": ranks, "OMPI_COMM_WORLD_RANK": rank},
        "flux run": {"FLUX_JOB_SIZE": ranks, "FLUX_TASK_RANK": rank},
        "srun (PMI)": {**step, **pmi, "PMI_JOBID": "1.0", "SLURM_MPI_TYPE": "pmi2"}, "srun": step}[launcher].items()}


@pytest.mark.parametrize("launcher", in_turn(["torchrun", "mpiexec", "srun", "srun (PMI)", "flux run"], 2))
def test_processes_that_would_train_alone(run, launcher):
    """Two are refused, in one line of the first; one trains, as without a launcher; neither help nor a dry run care."""
    for program in ("02_data_parallel", "02_minimal"):
        done = run(program, code=2, env=launched(launcher, 2, 0))
        done.says(f"{launcher}", "started 2 processes", "each would train alone", "mpirun -np 2 of Open MPI")
        assert done.err.count("\n") == 1 and not done.out, done
        assert ("type srun --mpi=pmix -n 2 or mpirun" in done.err) == ("srun" in launcher), done
        assert not run(program, code=2, env=launched(launcher, 2, 1)).err
    assert "step     1/1" in run("02_data_parallel", *SHAPE, env=launched(launcher, 1, 0)).out
    assert "--bucket-mb" in run("02_data_parallel", "--help", env=launched(launcher, 2, 0)).out
    assert not run("02_data_parallel", "--help", env=launched(launcher, 2, 1)).out
    assert "4 ranks" in run("08_3d_full", *DRY, env=launched(launcher, 1, 0)).out
    run("08_3d_full", *DRY, code=2, env=launched(launcher, 2, 0)).says("--comm fake", f"{launcher}")


def test_one_process_under_a_launcher(run):
    for program in ("01_single_gpu", "01_minimal"):
        for launcher in ("Open MPI's mpirun", "srun (PMI)"):
            done = run(program, code=2, env=launched(launcher, 2, 0))
            done.says("each would train alone: this program is one process, start it without", launcher)
            assert not run(program, code=2, env=launched(launcher, 2, 1)).err


def test_wrong_flags_on_several_ranks(run):
    """Before MPI is started: one line all the same."""
    done = run("02_data_parallel", "--stepz", "3", code=2, ranks=2)
    assert done.err.count("--stepz: unknown flag") == 1, done


def threads(done):
    return int(re.search(r"kernels, (\d+) thread", done.out)[1])


@pytest.mark.parametrize("environment, expected", [
    ({}, len(CORES)), ({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "5,2"}, 5), ({"OPENBLAS_NUM_THREADS": "4"}, 4),
    ({"OMP_PROC_BIND": "true"}, len(CORES))])
def test_threads_of_one_rank(run, environment, expected):
    for program in ("01_single_gpu", "02_data_parallel"):
        done = run("env", "-u OMP_NUM_THREADS -u OPENBLAS_NUM_THREADS",
                   *(f"{name}={value}" for name, value in environment.items()), run.binaries / program, "--steps 0")
        assert threads(done) == expected, done


@pytest.mark.skipif(len(CORES) < 2, reason="one core here")
def test_cores_that_a_launcher_gave(run):
    """A rank has all of those that are its own, and a part of shared ones; cores that nobody uses are told."""
    def start(words, ranks):
        return run("env", "-u OMP_NUM_THREADS", *words, run.binaries / "02_data_parallel", "--steps 0", ranks=ranks)
    own = start(["taskset", "-c", str(CORES[0])], 1)
    assert threads(own) == 1 and f"bound to 1 of {len(CORES)} cores, and {len(CORES) - 1} idle" in own.out, own
    shared = start([], 2)  # the harness's mpirun does not bind
    assert threads(shared) == max(1, len(CORES) // 2) and "idle" not in shared.out, shared
    assert "idle" not in run("taskset", "-c", CORES[0], run.binaries / "02_data_parallel", "--steps 0").out  # asked for 1
