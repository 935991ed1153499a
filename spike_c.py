from dataclasses import replace
def descend(tag, L, keys, best):
    ms=None
    for key in keys:
        found=[]
        for h in [Matvec(r,w) for r in (1,2,4) for w in (4,8)]:
            setk(key,1,h)
            one=resized(L, kv_cache_memory="2GiB", max_num_seqs=1, cudagraph_capture_sizes=(1,))
            found.append((rate(one,1,new=48,reps=2),h)); del one
        found.sort(key=lambda f:f[0]); ms,h=found[0]
        setk(key,1,h); best[key]=h
        print(tag,key,[(round(1000*m,1),f"{x.rows},{x.warps}") for m,x in found], flush=True)
    return ms
L=load("llama-3.2-1b")
trial("1B base",L,1)
best={}
descend("1B",L,["plain 8192x2048 gated norm","plain 2048x8192","plain 2048x2048","plain 3072x2048 norm","plain 128256x2048 norm"],best)
trial("1B tuned",L,1,new=127)
O="plain 2048x2048"
setk(O,1,Matvec(1,4,512,3)); trial("1B O ahead",L,1,new=127)
setk(O,1,best[O])
for st in (1,3):
    dec.FEW=replace(dec.FEW,stages=st); trial(f"1B stages {st}",L,1)
dec.FEW=replace(dec.FEW,stages=2)
del L; torch.cuda.empty_cache()
L=load("llama-3.1-8b")
trial("8B base",L,1)
O="plain 4096x4096"; Q="plain 6144x4096 norm"; GU="plain 14336x4096 gated norm"; D="plain 4096x14336"
descend("8B",L,[GU,D,O,Q],best)
trial("8B tuned",L,1,new=127)
trial("8B 256",L,1,prompt=190,new=127)
trial("8B 8k",L,1,prompt=8060,new=127)
setk(O,64,Gemm(64,64,128,2,4,3,8))
trial("8B base",L,64)
dec.MANY=dec.Size(2,8,3); trial("8B MANY 128 w8 s3",L,64)
dec.MANY=dec.Size(1,4,3); trial("8B MANY 64 w4 s3",L,64)
dec.MANY=dec.Size(4,8,2); trial("8B MANY 256 w8 s2",L,64)
dec.MANY=dec.Size(2,4,3); trial("8B MANY 128 w4 s3",L,64)
