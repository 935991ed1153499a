import sys, time, copy, torch
import graft
from graft.models.load import load_model
from graft.ops.fused_linear import choice
from graft.ops.fused_linear.choice import Matvec, Gemm
from graft.ops.cached_attention.decode import triton as dec
from graft.kvcache.tensors import LayerShape
from graft.runtime.build import build_engine
from graft.runtime.options import EngineOptions
from dataclasses import asdict
dev="NVIDIA H200"
def resized(llm, **options):
    other = copy.copy(llm)
    layers = [LayerShape(t.shape[2], t.shape[3], t.dtype) for t in llm.engine.tensors[::2]]
    other.engine, other.size = build_engine(llm.engine.graph, llm.model, layers, llm.engine.manager.block_size, EngineOptions(**options), llm.graph_module)
    return other
def setk(key, tokens, how):
    t=choice.table(dev)
    e={"kind": "library" if how is None else type(how).__name__.lower(), **({} if how is None else asdict(how))}
    t[key]["tokens"][str(tokens)]=e
    choice.choose_kernel.cache_clear()
def rate(llm, batch, prompt=128, new=96, reps=3):
    g=torch.Generator().manual_seed(1)
    P=[[torch.randint(3,1000,(prompt,),generator=g).tolist() for _ in range(batch)] for _ in range(reps+1)]
    ms=[]
    for r,p in enumerate(P):
        llm.generate(p, graft.SamplingParams(max_tokens=new, ignore_eos=True))
        s=llm.stats
        if r: ms.append(1e3*s.decode_seconds/(s.decode_tokens/batch))
    return sorted(ms)[len(ms)//2]
def trial(name, llm, batch, **kw):
    try:
        one=resized(llm, kv_cache_memory="8GiB", max_num_seqs=batch, cudagraph_capture_sizes=(batch,))
        ms=rate(one,batch,**kw)
        print(f"{name:<60} b{batch} {kw} {ms*1000:8.1f} us  {batch*1000/ms:8.1f} tok/s", flush=True)
        if one.stats.bucket_misses: print('   MISSES', one.stats.bucket_misses, one.report.notes)
        del one
    except Exception as e:
        print(name,'FAILED',type(e).__name__,str(e)[:300], flush=True)
def load(name, **kw):
    t=time.time()
    llm=graft.LLM(load_model(name,device="cuda"), kv_cache_memory="8GiB", max_num_seqs=1, cudagraph_capture_sizes=(1,), **kw)
    print(name, kw, 'build', round(time.time()-t,1), 's', [n for n in llm.report.notes if 'decode' in n or 'PDL' in n or 'launch' in n], flush=True)
    return llm
exec(open(sys.argv[1]).read())
