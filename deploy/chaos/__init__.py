"""``deepinfer chaos``: real processes are killed and paused under load; what clients got counts.

One trial is ``trial.py``, a campaign of them ``campaign.py`` (the parent) and ``job.py`` (a child
with a cluster of its own); ``history.py`` judges what a client received. No cluster's logic here.
"""
