"""Starting jobs: the commands `ringrun` and `ringlaunch`, and `ringtrain.run(function, num_proc=4)`.

command, flags, config, horovod_flags
             the command line, to the job and its exit code
function, arguments, worker
             `ringtrain.run`, what it takes, and what its ranks run
job          what is to be started, without any launcher's words
allocation/  the hosts: as the user names them, or as a batch system has allotted them
launchers/   which network and which MPI there is, the launcher, and that launcher's words
start/       what stands in the place of mpirun without an MPI
yarn/        the same in containers of YARN
elastic/     jobs whose ranks come and go
roles/       the command `ringlaunch`: jobs with workers and servers
supervise/   a job from its start until nothing of it is left
check/       `ringrun --check` and `--check-build`
"""
