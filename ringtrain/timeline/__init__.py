"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

recording  begins and ends it, on one clock, and brings the parts of all ranks together
files      where the parts are, and the events in them; how they are merged, also for a job that was killed
report/    where the time of a step goes (docs/timeline.md)
"""
