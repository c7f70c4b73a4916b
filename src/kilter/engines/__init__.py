"""Sites behind an engine that runs already: Flower (`kilter[flower]`) or NVFlare (`kilter[nvflare]`).

An engine carries bytes to a site and the answer back, and says whose it is; everything else is `kilter.net`'s: the runtime at the
server (`net.star`), and the site that carries out orders and keeps its state on its own disk (`net.site`).

desk      the server's side: sites that speak when spoken to
visit     the site's side: one letter in, one letter out
settings  what an engine's configuration says of a run and of a site
grid      a desk whose letters go through Flower's grid
flower    what Flower runs: a ServerApp and a ClientApp
calls     a desk whose letters go through remote calls
flare     what NVFlare runs: a server object and a site object of its Collab API (job writes the job's folder)
"""
