"""Starting processes in containers of YARN: what ringrun and ringlaunch have in mpirun's place there.

Run by the path of this folder.

starter           one process, which ringrun starts like any launcher: gets the containers, then it is as without MPI
role_starter      the same for ringlaunch
containers        how they are asked for, awaited and given back
application       Hadoop's own DistributedShell, which asks for the containers
resource_manager  its REST interface: what has become of the application, and its end
container         in each container: goes to the starter, and is the agent of one rank
link              what the starter has of a container
"""
