"""Jobs with servers: `ringlaunch -n 2 -s 2 python train.py` starts workers, servers and a scheduler, as MXNet's does.

command    the command line, to the job and its exit code
addresses  the hosts, as MXNet's launch.py names them
cast       which processes such a job has, what they are called, and where each one goes
terms      what the user allows such a job to do
copies     the current folder on all hosts
variables  what each process is told: DMLC_ROLE and its relatives
starter    in the place of the starter of other jobs: has a keeper on each host, and decides when the job is over
main       the command line of the starter
"""
