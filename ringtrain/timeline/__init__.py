"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

recording  begins and ends it, on one clock, and brings the parts of all ranks together
report/    where the time of a step goes (docs/timeline.md)
"""
