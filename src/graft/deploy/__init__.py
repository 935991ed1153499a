"""`graft serve --replicas N`, `graft deploy app.yaml`: several engines behind one address, on Ray Serve (graft[ray]).

    clients ──HTTP──▶ Gateway: encode, choose ──handle──▶ EngineReplica: graft serve's app ──▶ engine process
                        ▲ index of blocks                    │ events of its cache
                        └──────────── CacheDirectory ◀───────┘

`policy` decides which replica a request goes to, and `spec` reads app.yaml; neither imports Ray.
"""
