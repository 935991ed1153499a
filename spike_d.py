def descend(tag, L, keys, cands):
    for key in keys:
        found=[]
        for h in cands(key):
            try:
                setk(key,1,h)
                one=resized(L, kv_cache_memory="2GiB", max_num_seqs=1, cudagraph_capture_sizes=(1,))
                found.append((rate(one,1,new=48,reps=2),h)); del one
            except Exception as e: print(key,h,'FAILED',str(e)[:100])
        found.sort(key=lambda f:f[0]); ms,h=found[0]
        setk(key,1,h)
        print(tag,key,[(round(1000*m,1),f"{x.rows},{x.warps}") for m,x in found], flush=True)
L=load("llama-3.2-1b")
trial("1B base",L,1)
descend("1B",L,["plain 8192x2048 gated norm","plain 2048x8192","plain 2048x2048","plain 3072x2048 norm"],lambda k:[Matvec(r,w) for r,w in ((1,4),(2,2),(4,2),(2,1),(1,2),(1,8))])
trial("1B tuned",L,1,new=127)
del L; torch.cuda.empty_cache()
L=load("llama-3.1-8b")
trial("8B base",L,1)
O="plain 4096x4096"; Q="plain 6144x4096 norm"; GU="plain 14336x4096 gated norm"; D="plain 4096x14336"
descend("8B",L,[GU,D,O,Q],lambda k:[Matvec(r,w) for r,w in ((4,8),(2,2),(4,2),(2,4),(4,4))])
trial("8B tuned",L,1,new=127)
trial("8B 256",L,1,prompt=190,new=127)
trial("8B 8k",L,1,prompt=8060,new=127)
trial("8B base",L,64)
