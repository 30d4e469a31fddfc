"""Starting ranks without an MPI: what ringrun has in mpirun's place. Run by the path of this folder.

starter  one process, which ringrun starts like any launcher: serves the rendezvous, has an agent on each host
agent    on each host: the parent of its ranks
"""
