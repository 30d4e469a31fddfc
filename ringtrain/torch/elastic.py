"""`hvd.elastic`, of which there is nothing yet but this sentence."""

raise ImportError("hvd.elastic comes later: ringtrain has no elastic jobs yet", name=__name__)
