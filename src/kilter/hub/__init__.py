"""Many runs between the same sites: a hub with a queue, agents at the sites, and the commands of those who submit.

config          hub.toml and site.toml
messages        everything that hub, agents and submitters send each other, as types
job_queue       the queue, in SQLite
schedule        which runs to start, to suspend and to give up: a function of the queue and the connected agents
processes       processes that end with their parent; child: their entry point
hub, service    the hub, and its port
relay           passes a site's stream on to the process of its run
agent           the agent of a site: starts one site process for each run
admission       what a submitted experiment or study may contain
network_study   a study whose runs go through the queue
client          what `kilter submit`, `jobs`, `logs`, `cancel` and `fetch` call

The hub and the agents import neither torch nor anything that trains: each run is a process of its own, the same
`kilter serve` and `kilter join` as without a hub. So a crash ends at most one run, and the run resumes.
"""
