"""Reports where the time of a step goes: figures, a verdict and a page, from the file of a timeline.

    trace    the file -> operations, waits and steps of each rank; what each rank did at each moment of its steps
    figures  all numbers: which operations of the ranks are one, bandwidth, what the page shows; the verdict
    page     an HTML page with charts; style.css is a part of it

Nothing here knows of a running job. docs/timeline.md defines every figure.
"""
