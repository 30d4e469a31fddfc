"""Records that are written while a job runs.

metrics          counters, for programs and for Prometheus
flight_recorder  this rank's last operations, as a file, once something has gone wrong
timeline_files   the parts of a timeline, and the file that is made of them
steps            the steps of the optimizers
folders          where files are written to that nobody has named a folder for
logger           what there is to say beside errors
"""
