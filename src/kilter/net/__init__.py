"""Real sites over gRPC: a star around a server, or peers with no server at all (`pip install 'kilter[net]'`).

frames   how a letter is cut into frames and put together again
tls      certificates: who is at the other end
door     the server's end of the sites' streams
star     the runtime at the server: `execute` sends the step and collects replies until the deadline
site     the life of a site: it dials out, carries out orders, keeps its state on disk (`keep`)
terms    what server and sites agree on before the first order: the experiment, the shape of the data
peer     the runtime of a peer: the script in the first person
seal     letters that a relay cannot read
"""

LARGEST = 2**31  # bytes in the body of a letter, by default
