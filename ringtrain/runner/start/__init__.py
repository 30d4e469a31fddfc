"""Starting processes: what ringrun and ringlaunch have in the place of mpirun. Run by the path of this folder.

main             the command lines of the starters
starter          one process, which ringrun starts like any launcher: has an agent on each host, ends the job
elastic_starter  the same for elastic jobs, and which processes such a job should have
role_starter     the same for jobs with servers
placement        the slots of a job, now and later: what a starter asks for agents
agent            on each host: the parent of its processes; links: the way from the starter to its agents
yarn             containers of YARN; yarn_container: the agent of each
"""
