"""Starting jobs: the commands `ringrun` and `ringlaunch`, and `ringtrain.run(function, num_proc=4)`.

command         `ringrun`: the command line, to the job and its exit code; launch_command: the same of `ringlaunch`
flags           flags of both, and --config-file; horovod_flags: those of horovodrun
function        `ringtrain.run`, what it takes, and what its ranks run
job             what is to be started, without any launcher's words; elastic jobs
hosts           where: hosts, and how commands and variables reach them
launchers       which network and launcher a job gets, and that launcher's words
mpi_library     which MPI there is
start/          what stands in the place of mpirun without an MPI
batch_scripts   jobs that a batch system starts later
supervise/      a job from its start until nothing of it is left
status/         `ringrun status`: what a job does that runs, and what is the matter with it
check           `ringrun --check` and `--check-build`
installed       which copy of ringtrain Python finds, and whose package `horovod` is
"""
