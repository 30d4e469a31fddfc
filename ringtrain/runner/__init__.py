"""Starting jobs: the commands `ringrun` and `ringlaunch`, and `ringtrain.run(function, num_proc=4)`.

command         `ringrun`: the command line, to the job and its exit code; launch_command: the same of `ringlaunch`
flags           flags of both, and --config-file; horovod_flags: those of horovodrun; elastic_args: elastic jobs
function        `ringtrain.run`, what it takes, and what its ranks run
job             what is to be started, without any launcher's words; hosts: where
launchers       which network and launcher a job gets, and that launcher's words
mpi_library     which MPI there is; mpi_probe: in a process of its own
remote          what goes to other hosts: commands and variables
start/          what stands in the place of mpirun without an MPI
batch_scripts   jobs that a batch system starts later
supervise/      a job from its start until nothing of it is left
check           `ringrun --check` and `--check-build`
installed       which copy of ringtrain Python finds, and whose package `horovod` is
"""
