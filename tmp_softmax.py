import sys
sys.path.insert(0,"bench")
import gpu_ops as g, torch, triton, triton.language as tl
from anydevice.engines.kernels import triton_softmax as ts
from anydevice.engines.kernels.triton_launching import overlapping, fetch_ahead
@triton.jit
def chunked(x,out,rows,columns,base,more,block:tl.constexpr,stages:tl.constexpr,overlap:tl.constexpr):
    column=tl.arange(0,block); here=column<columns
    p=tl.program_id(0)
    first=p*base+tl.minimum(p,more)
    last=first+base+(p<more).to(tl.int32)
    if overlap:
        fetch_ahead(x+first.to(tl.int64)*columns, columns*2)
        tl.extra.cuda.gdc_launch_dependents(); tl.extra.cuda.gdc_wait()
    for r in tl.range(first,last,num_stages=stages):
        at=r.to(tl.int64)*columns+column
        v=tl.load(x+at,here,float("-inf"),eviction_policy="evict_first").to(tl.float32)
        m=tl.max(v,0); e=tl.exp2((v-m)*1.4426950408889634)
        tl.store(out+at,(e*(1.0/tl.sum(e,0))).to(out.dtype.element_ty),here)
lim=g.ceilings(); x=g.random(4096,32000,sets=3); moved=2*4096*32000*2
right=torch.softmax(x[0].double(),-1)
def ch(w,st):
    def call(n):
        o=torch.empty_like(x[n]); chunked[(132,)](x[n],o,4096,32000,31,4,block=32768,stages=st,num_warps=w,**overlapping(x[n].device)); return o
    return call
ways={"now":lambda n: ts.softmax(x[n]),"chunk16,3":ch(16,3),"chunk8,3":ch(8,3),"chunk16,2":ch(16,2)}
for k,f in ways.items():
    err=((f(0).double()-right).norm()/right.norm()).item()
    s=sorted(g.seconds(f,3) for _ in range(5)); print(k,"%.3f %.3f"%(moved/s[2]/lim["copy"],moved/s[0]/lim["copy"]),err,flush=True)
