L=load("llama-3.2-1b")
trial("1B base",L,1)
dec.EARLY_TILE=128; dec.EARLY_WARPS=4; trial("1B tile 128 w4",L,1)
dec.EARLY_TILE=256; dec.EARLY_WARPS=4; trial("1B tile 256 w4",L,1)
dec.EARLY_WARPS=8
dec.EARLY_SPLITS=999; trial("1B pipelined attention",L,1)
dec.EARLY_SPLITS=8
O="plain 2048x2048"; Q="plain 3072x2048 norm"; GU="plain 8192x2048 gated norm"; D="plain 2048x8192"
for h in (Matvec(2,4,528,1),Matvec(1,4,512,3)):
    setk(O,1,h); trial(f"1B O {h}",L,1)
setk(O,1,Matvec(2,4))
for h in (Matvec(2,4,528,1),Matvec(2,4,264,1),Matvec(1,4,1056,1),Matvec(1,4)):
    setk(GU,1,h); trial(f"1B GU {h}",L,1)
setk(GU,1,Matvec(2,4))
for h in (Matvec(2,8,528,1),Matvec(1,8,528,1)):
    setk(D,1,h); trial(f"1B D {h}",L,1)
setk(D,1,Matvec(2,8))
del L; torch.cuda.empty_cache()
L=load("llama-3.1-8b")
trial("8B base",L,1)
O="plain 4096x4096"; Q="plain 6144x4096 norm"; GU="plain 14336x4096 gated norm"; D="plain 4096x14336"
for h in (Matvec(2,4,528,1),Matvec(4,4,512,1),Matvec(4,4)):
    setk(O,1,h); trial(f"8B O {h}",L,1)
setk(O,1,Matvec(2,4))
setk(D,1,Matvec(2,4,528,1)); trial("8B D ahead",L,1); setk(D,1,Matvec(2,4))
setk(GU,1,Matvec(2,4,528,1)); trial("8B GU ahead",L,1); setk(GU,1,Matvec(4,8))
setk(GU,1,Matvec(2,4)); trial("8B GU 2,4",L,1); setk(GU,1,Matvec(4,8))
trial("8B base 8k",L,1,prompt=8000)
trial("8B base 256",L,1,prompt=200)
setk(O,64,Gemm(64,64,128,4,4,3,4)); trial("8B O gemm s4",L,64)
setk(O,64,Gemm(64,64,128,2,4,3,8)); trial("8B O gemm s2 early8",L,64)
setk(O,64,Gemm(64,64,128,2,4,3,0)); trial("8B O gemm s2 early0",L,64)
setk(D,64,Gemm(64,64,128,4,4,3,0)); trial("8B D early0",L,64)
