"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

recording    begins and ends it, on one clock
gather       brings the parts of all ranks together at the end
merge        does so later, for a job that was killed
files        where the parts are, and the events in them
file_checks  whether they can be there
report/      where the time of a step goes (docs/timeline.md)
"""
