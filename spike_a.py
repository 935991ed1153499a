L=load("llama-3.2-1b")
trial("1B base",L,1)
for t in (1,2,8):
    dec.LEAST_TILES=t; trial(f"1B LEAST {t}",L,1)
dec.LEAST_TILES=4
O="plain 2048x2048"; Q="plain 3072x2048 norm"; GU="plain 8192x2048 gated norm"; D="plain 2048x8192"
for h in (Matvec(2,4,528,1),Matvec(4,4,512,1),Matvec(2,4,256,3),Matvec(1,4,512,3),Matvec(4,4,128,3)):
    setk(O,1,h); trial(f"1B O {h}",L,1)
setk(O,1,Matvec(2,4))
for h in (Matvec(4,4,528,3),Matvec(2,4,528,7),Matvec(1,4,1056,7)):
    setk(GU,1,h); trial(f"1B GU {h}",L,1)
setk(GU,1,Matvec(2,4))
for h in (Matvec(1,4,528,3),Matvec(2,4,512,1)):
    setk(D,1,h); trial(f"1B D {h}",L,1)
del L; torch.cuda.empty_cache()
L=load("llama-3.1-8b")
trial("8B base",L,1)
O="plain 4096x4096"; Q="plain 6144x4096 norm"; GU="plain 14336x4096 gated norm"; D="plain 4096x14336"
for h in (Matvec(2,4,528,1),Matvec(2,4,512,3),Matvec(4,4,256,3),Matvec(4,8,256,3),Matvec(1,4,1024,3)):
    setk(O,1,h); trial(f"8B O {h}",L,1)
setk(O,1,Matvec(2,4,512,3))
for h in (Matvec(4,4,528,1),Matvec(4,4,512,2)):
    setk(Q,1,h); trial(f"8B Q {h}",L,1)
trial("8B base 8k",L,1,prompt=8000)
trial("8B base 256",L,1,prompt=200)
trial("8B base",L,64)
O64=Gemm(64,64,128,4,4,3,4); setk(O,64,O64); trial("8B O gemm s4",L,64)
setk(O,64,Gemm(64,64,128,2,4,3,8)); trial("8B O gemm s2 early8",L,64)
setk(Q,64,Gemm(64,64,128,2,4,3,4)); trial("8B Q gemm s2",L,64)
setk(GU,64,Gemm(64,64,128,1,4,3,4)); trial("8B GU gemm 128x3 early4",L,64)
