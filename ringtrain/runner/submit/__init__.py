"""Jobs that a batch system starts later: a script calls ringrun or ringlaunch again, inside the allocation.

script   what the script says
slurm    sbatch
sge      qsub
"""
