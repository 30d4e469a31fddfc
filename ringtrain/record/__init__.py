"""Records that are written while a job runs.

metrics          counters, for programs and for Prometheus
flight_recorder  this rank's last operations, as a file, once something has gone wrong
logger           what there is to say beside errors
"""
