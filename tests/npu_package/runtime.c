/* A pretended CANN runtime (libascendcl.so) in host memory.
 *
 * Comes in: calls of torch_npu. Goes out: what its host code needs to hold tensors, copy them and
 * launch operators on a machine without CANN. Always holds: device memory is malloc'ed host memory,
 * streams and events do nothing because everything runs at once, and a graph that is captured is
 * kept on the Python side and called again through qc_replay.
 *
 * A line with a "stub" comment replaces a generated function of the same name that does nothing.
 * QC_FAKE_NPU  how many devices there are, 0 by default
 * QC_FAKE_SOC  the device's name, Ascend910B3 by default
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
typedef int aclError;
#define X __attribute__((visibility("default")))
static __thread int cur_dev = 0;
static int ndev(void){ const char*s=getenv("QC_FAKE_NPU"); return s?atoi(s):0; }
/*stub:aclInit*/            X aclError aclInit(const char*p){ return 0; }
/*stub:aclFinalize*/        X aclError aclFinalize(void){ return 0; }
/*stub:aclrtGetDeviceCount*/X aclError aclrtGetDeviceCount(uint32_t*c){ *c=(uint32_t)ndev(); return 0; }
/*stub:aclrtSetDevice*/     X aclError aclrtSetDevice(int32_t d){ if(d<0||d>=ndev()) return 107001; cur_dev=d; return 0; }
/*stub:aclrtGetDevice*/     X aclError aclrtGetDevice(int32_t*d){ *d=cur_dev; return 0; }
/*stub:aclrtResetDevice*/   X aclError aclrtResetDevice(int32_t d){ return 0; }
/*stub:aclrtGetCurrentContext*/ X aclError aclrtGetCurrentContext(void**c){ *c=(void*)0x1000; return 0; }
/*stub:aclrtSetCurrentContext*/ X aclError aclrtSetCurrentContext(void*c){ return 0; }
/*stub:aclrtGetSocName*/    X const char* aclrtGetSocName(void){ const char*s=getenv("QC_FAKE_SOC"); return s?s:"Ascend910B3"; }
static long sid=0x2000;
/*stub:aclrtCreateStream*/  X aclError aclrtCreateStream(void**s){ *s=(void*)(sid+=16); return 0; }
/*stub:aclrtCreateStreamWithConfig*/ X aclError aclrtCreateStreamWithConfig(void**s,uint32_t p,uint32_t f){ *s=(void*)(sid+=16); return 0; }
X aclError aclrtStreamQuery(void*s,int*st){ *st=0; return 0; }
X aclError aclrtStreamGetId(void*s,int32_t*id){ *id=(int32_t)(long)s; return 0; }
X aclError aclrtDestroyStreamForce(void*s){ return 0; }
X aclError aclrtSetStreamFailureMode(void*s,uint64_t m){ return 0; }
X aclError aclrtSetStreamAttribute(void*s,int a,void*v){ return 0; }
X aclError aclrtSetStreamOverflowSwitch(void*s,uint32_t f){ return 0; }
X aclError aclrtGetStreamOverflowSwitch(void*s,uint32_t*f){ *f=0; return 0; }
X aclError aclrtSynchronizeDeviceWithTimeout(int32_t t){ return 0; }
/*stub:aclrtCreateEventExWithFlag*/ X aclError aclrtCreateEventExWithFlag(void**e,uint32_t f){ *e=malloc(16); return 0; }
X aclError aclrtCreateEventWithFlag(void**e,uint32_t f){ *e=malloc(16); return 0; }
/*stub:aclrtDestroyEvent*/  X aclError aclrtDestroyEvent(void*e){ free(e); return 0; }
X aclError aclrtQueryEventStatus(void*e,int*st){ *st=1; return 0; }
X aclError aclrtQueryEventWaitStatus(void*e,int*st){ *st=0; return 0; }
/*stub:aclrtEventElapsedTime*/ X aclError aclrtEventElapsedTime(float*ms,void*a,void*b){ *ms=0; return 0; }
static aclError dmalloc(void**p,size_t n){ *p=aligned_alloc(512,(n+511)/512*512); return *p?0:207001; }
/*stub:aclrtMalloc*/        X aclError aclrtMalloc(void**p,size_t n,int pol){ return dmalloc(p,n); }
X aclError aclrtMallocAlign32(void**p,size_t n,int pol){ return dmalloc(p,n); }
/*stub:aclrtFree*/          X aclError aclrtFree(void*p){ free(p); return 0; }
/*stub:aclrtMallocHost*/    X aclError aclrtMallocHost(void**p,size_t n){ return dmalloc(p,n); }
/*stub:aclrtFreeHost*/      X aclError aclrtFreeHost(void*p){ free(p); return 0; }
/*stub:aclrtMemcpy*/        X aclError aclrtMemcpy(void*d,size_t dm,const void*s,size_t n,int k){ memmove(d,s,n); return 0; }
/*stub:aclrtMemcpyAsync*/   X aclError aclrtMemcpyAsync(void*d,size_t dm,const void*s,size_t n,int k,void*st){ memmove(d,s,n); return 0; }
X aclError aclrtMemcpyAsyncWithCondition(void*d,size_t dm,const void*s,size_t n,int k,void*st){ memmove(d,s,n); return 0; }
/*stub:aclrtMemset*/        X aclError aclrtMemset(void*d,size_t dm,int32_t v,size_t n){ memset(d,v,n); return 0; }
X aclError aclrtMemsetAsync(void*d,size_t dm,int32_t v,size_t n,void*st){ memset(d,v,n); return 0; }
/*stub:aclrtGetMemInfo*/    X aclError aclrtGetMemInfo(int a,size_t*f,size_t*t){ *f=(size_t)8<<30; *t=(size_t)16<<30; return 0; }
X aclError aclrtPointerGetAttributes(const void*p,void*attr){ memset(attr,0,64); return 0; }
/*stub:aclGetRecentErrMsg*/ X const char* aclGetRecentErrMsg(void){ return "fake acl"; }
X aclError aclrtGetLastError(int l){ return 0; }
X aclError aclrtPeekAtLastError(int l){ return 0; }
X aclError aclrtSetDeviceSatMode(int m){ return 0; }
X aclError aclrtSetOpExecuteTimeOut(uint32_t t){ return 0; }
X aclError aclrtSetOpExecuteTimeOutV2(uint64_t t,uint64_t*a){ if(a)*a=t; return 0; }
X aclError aclrtSetOpWaitTimeout(uint32_t t){ return 0; }
X aclError aclrtCtxSetSysParamOpt(int o,int64_t v){ return 0; }
X aclError aclrtSetSysParamOpt(int o,int64_t v){ return 0; }
X aclError aclrtGetSysParamOpt(int o,int64_t*v){ *v=0; return 0; }
X aclError aclrtGetPrimaryCtxState(int32_t d,uint32_t*f,int32_t*a){ if(f)*f=0; *a=1; return 0; }
X aclError aclrtGetDeviceUtilizationRate(int32_t d,void*u){ return 0; }
X aclError aclrtGetDeviceInfo(uint32_t d,int attr,int64_t*v){ *v=24; return 0; }
X aclError aclrtGetDeviceResLimit(int32_t d,int t,uint32_t*v){ *v=24; return 0; }
X aclError aclrtGetStreamResLimit(void*s,int t,uint32_t*v){ *v=24; return 0; }
X aclError aclrtGetResInCurrentThread(int t,uint32_t*v){ *v=24; return 0; }
X aclError aclrtGetLogicDevIdByUserDevId(int32_t u,int32_t*l){ *l=u; return 0; }
X aclError aclrtHostRegister(void*p,uint64_t n,int t,void**d){ *d=p; return 0; }
X aclError aclrtHostUnregister(void*p){ return 0; }
X aclError aclrtDeviceGetUuid(int32_t d,void*u){ memset(u,0,16); return 0; }
X aclError aclSetCompileopt(int o,const char*v){ return 0; }
/*stub:aclGetCompileoptSize*/ X size_t aclGetCompileoptSize(int o){ return 16; }
/*stub:aclGetCompileopt*/   X aclError aclGetCompileopt(int o,char*v,size_t n){ strncpy(v,"disable",n); return 0; }
/*stub:aclGetDeviceCapability*/ X aclError aclGetDeviceCapability(uint32_t d,int i,int64_t*v){ *v=24; return 0; }
/*stub:aclopCompileAndExecute*/ X aclError aclopCompileAndExecute(const char*op){ fprintf(stderr,"[fake acl] aclop %s is not emulated\n",op); return 500002; }
X aclError aclopCompileAndExecuteV2(const char*op){ fprintf(stderr,"[fake acl] aclop %s is not emulated\n",op); return 500002; }
typedef struct { char version[128]; int a,b,c,d,e; char rest[256]; } cannver;
X aclError aclsysGetVersionStr(char*pkg,char*v){ strcpy(v,"8.5.0"); return 0; }
/* graph capture (aclgraph): the python side keeps the captured closures per model id */
X int qc_capturing = 0; static int qc_models = 0;
X void (*qc_replay)(int) = 0;
X aclError aclmdlRICaptureBegin(void*s,int mode){ qc_capturing = ++qc_models; return 0; }
X aclError aclmdlRICaptureGetInfo(void*s,int*st,void**m){ *st = qc_capturing?1:0; if(m)*m=(void*)(long)qc_capturing; return 0; }
X aclError aclmdlRICaptureEnd(void*s,void**m){ *m=(void*)(long)qc_capturing; qc_capturing=0; return 0; }
X aclError aclmdlRIExecuteAsync(void*m,void*s){ if(qc_replay) qc_replay((int)(long)m); return 0; }
X aclError aclmdlRIDestroy(void*m){ return 0; }
X aclError aclmdlRIGetId(void*m,uint32_t*id){ *id=(uint32_t)(long)m; return 0; }
X aclError aclmdlRICaptureThreadExchangeMode(int*m){ return 0; }
X aclError aclmdlRIDebugPrint(void*m){ return 0; }
X aclError aclmdlRIDebugJsonPrint(void*m,const char*p,uint32_t f){ return 0; }
X aclError aclmdlRICaptureTaskGrpBegin(void*s){ return 0; }
X aclError aclmdlRICaptureTaskGrpEnd(void*s,void**h){ *h=(void*)1; return 0; }
X aclError aclmdlRICaptureTaskUpdateBegin(void*s,void*h){ return 0; }
X aclError aclmdlRICaptureTaskUpdateEnd(void*s){ return 0; }
