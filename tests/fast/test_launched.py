"""Which of how many processes this is, by the variables of launchers."""

from __future__ import annotations

import pytest

from infinity_command import deepspeed_launcher, startup
from infinity_command.launched import Place, adopt, place

MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "2",
}
PMI = {"PMI_SIZE": "7", "PMI_RANK": "5"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Place("torchrun", 3, 4, 1, 2),
        ),
        (MPIRUN, Place("mpirun", 3, 4, 1, 2)),
        (MPIRUN | {"WORLD_SIZE": "4"}, Place("mpirun", 3, 4, 1, 2)),
        (MPIRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"},
            Place("mpirun", 1, 2, 1, 2),
        ),
        (SRUN, Place("srun", 5, 7, 1, 2)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN | PMI, Place("srun", 5, 7, 1, 2)),
        (PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}, Place("mpiexec", 5, 7, 1, 3)),
        (PMI, Place("mpiexec", 5, 7, 5, 7)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Place("srun", 0, 2, 0, 2)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, None),
        ({"SLURM_NTASKS": "2"}, None),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, Place("flux run", 1, 2, 1, 2)),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], expected: Place | None) -> None:
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set, so this process could only"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set, so this process could only"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, but PMI_RANK is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but OMPI_COMM_WORLD_RANK is"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is 2, but SLURM_PROCID is not set"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK is 'x', which is no number"),
        (MPIRUN, "mpirun started 4 processes on several nodes, but MASTER_ADDR is not set"),
    ],
)
def test_a_place_that_is_not_known(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        adopt(environment)


def test_variables_of_mpi_become_those_of_torchrun() -> None:
    environment = MPIRUN | {"MASTER_ADDR": "node1"}
    adopt(environment)
    assert environment == MPIRUN | {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }
    assert place(environment) == Place("torchrun", 3, 4, 1, 2)


PROGRAM = ["-m", "infinity_command", "run"]


@pytest.mark.parametrize(
    ("arguments", "expected", "environment"),
    [
        (
            "--num_gpus 2 train.py --deepspeed --num_gpus 3",
            "--nproc-per-node=2 --master-port=29500 --no-python * train.py --deepspeed "
            "--num_gpus 3",
            {deepspeed_launcher.LOCAL_RANK: "1"},
        ),
        (
            "--include localhost:1,3 --master_port 7 --no_local_rank --module pack.train x",
            "--nproc-per-node=2 --master-port=7 --no-python * -m pack.train x",
            {"CUDA_VISIBLE_DEVICES": "1,3"},
        ),
        (
            "--num_accelerators=1 --master_addr here --bind_cores_to_rank -q train.py",
            "--nproc-per-node=1 --master-port=29500 --master-addr=here --no-python * train.py",
            {deepspeed_launcher.LOCAL_RANK: "1"},
        ),
    ],
)
def test_a_line_of_deepspeed_is_one_of_torchrun(
    arguments: str, expected: str, environment: dict[str, str]
) -> None:
    line, found = deepspeed_launcher.translated(arguments.split())
    start = line.index("-m")
    assert line[start : start + 3] == PROGRAM
    words = [*line[: start - 1], "*", *line[start + 3 :]]  # without the interpreter
    assert (" ".join(words), found) == (expected, environment)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "--num_nodes 2 --master_port 7 train.py --x",
            "deepspeed --num_nodes 2 asks for several nodes, and this command starts processes on "
            "one; type on each node: torchrun --nnodes N --node-rank R --nproc-per-node GPUS "
            "--master-addr HOST --master-port 7 --no-python infinity run train.py --x",
        ),
        ("--include a:0@b:0 train.py", "--include a:0@b:0 asks for several nodes"),
        ("--exclude localhost:1 train.py", "deepspeed --exclude is not supported: torchrun starts"),
        ("--autotuning run train.py", "deepspeed --autotuning is not supported: the engine plans"),
        ("--num_gpu 2 train.py", "deepspeed: unrecognized arguments: --num_gpu"),
        ("", "deepspeed: the following arguments are required: script"),
    ],
)
def test_a_line_of_deepspeed_that_is_none(arguments: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        deepspeed_launcher.translated(arguments.split())
    assert problem in str(error.value)


def test_hosts_of_a_job_are_several_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    hosts = tmp_path_factory.mktemp("job") / "hosts"
    hosts.write_text("# comment slots=1\none slots=4\ntwo slots=4\n")
    with pytest.raises(ValueError, match="names 2 nodes, and this command starts processes on one"):
        deepspeed_launcher.translated(["--hostfile", str(hosts), "train.py"])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /bin/accelerate launch --no_python infinity run train.py", True),
        ("python -m accelerate.commands.launch --no_python /bin/infinity run train.py", True),
        ("python /bin/accelerate-launch --no_python infinity run train.py", True),
        ("python /bin/accelerate launch train.py", False),
        ("python /bin/infinity run accelerate launch train.py", False),
        ("python accelerate_it.py infinity run train.py", False),
        ("python /bin/torchrun --no-python infinity run train.py", False),
    ],
)
def test_only_accelerate_that_launches_this_command_finds_the_package(
    command: str, expected: bool
) -> None:
    assert startup.launches_this_engine(command.split()) is expected
