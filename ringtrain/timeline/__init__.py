"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

recording  begins and ends it, on one clock, and brings the parts of all ranks together
merge      does so later, for a job that was killed
files      where the parts are, and the events in them
report/    where the time of a step goes (docs/timeline.md)
"""
