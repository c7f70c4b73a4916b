"""Real sites over gRPC: a star around a server, or peers without a server (`pip install 'kilter[net]'`).

frames          how a letter is cut into frames and put together again
fields, messages, results   everything that is sent, as types, checked on arrival
tls, seal       certificates, and letters that a relay cannot read
terms, policy, approvals    what a run does at a site, what a site allows, and what it has approved
disclosure, dry_run         what would leave a site, in plain words and by rehearsal
audit           what has left a site
transport, grpc_server      how a server reaches its sites
server, server_run          the runtime at the server, and a run from start to end
site, site_client, site_state   a site, its connection, and what it keeps on disk
peer, peer_transport        the runtime of a peer, and its letters
status, ports, limits       metrics, opening ports, limits on memory and time
"""

LARGEST = 2**31  # bytes in the body of a letter, by default
