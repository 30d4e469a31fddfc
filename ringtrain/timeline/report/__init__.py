"""Where the time of a step goes: figures, a verdict and a page, made of the file that a timeline has written.

    trace      the file -> operations, waits and steps of each rank
    meetings   which operations of the ranks are one, and who came last
    shares     what each rank did at each moment of its steps
    bandwidth  how fast the allreduces went
    figures    all of it, brought together
    verdict    one sentence, and what to do
    page       an HTML page; charts and style.css are its parts

Nothing here knows of a running job. docs/timeline.md defines every figure.
"""
