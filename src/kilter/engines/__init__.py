"""Sites behind an engine that runs already: Flower (`kilter[flower]`) or NVFlare (`kilter[nvflare]`).

An engine carries bytes to a site and the answer back, and says whose answer it is. Everything else is `kilter.net`'s: the runtime
at the server (`net.server`), and the site that carries out orders and keeps its state on its own disk (`net.site`).

engine_transport     the server's side: sites that answer when they are asked
site_endpoint        the site's side: one letter in, one letter out
settings             what an engine's configuration says about a run and about a site
flower_transport     letters through Flower's grid
flower               what Flower runs: a ServerApp and a ClientApp
nvflare_transport    letters through remote calls
nvflare, nvflare_job what NVFlare runs: a server object and a site object of its Collab API, and the folder of a job
"""
