"""Jobs that a batch system starts later: ringrun writes a script that calls it again, inside the allocation.

script   what the script says
slurm    sbatch
"""
