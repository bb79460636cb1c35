// Declarations of Foundation, Metal and Apple's C library, for libclang to parse ggml-metal-device.m. They are incomplete:
// test_metal_source.py compares the errors of the patched file with those of upstream's.
typedef signed char BOOL;
typedef unsigned long NSUInteger;
typedef long NSInteger;
#define nil ((id)0)
#define YES 1
#define NO 0
@interface NSObject
+ (id)alloc; + (id)new; - (id)init; - (id)retain; - (void)release; - (id)description;
@end
@interface NSString<T> : NSObject
- (const char *)UTF8String;
@end
#define CLASS(name) @interface name<T> : NSObject @end
CLASS(NSError) CLASS(NSMutableDictionary) CLASS(NSDictionary) CLASS(NSNumber) CLASS(NSSet) CLASS(NSMutableSet)
CLASS(NSLock) CLASS(NSArray) CLASS(NSMutableArray) CLASS(NSMutableString) CLASS(NSScanner) CLASS(NSBundle) CLASS(NSURL)
CLASS(NSProcessInfo) CLASS(NSFileManager) CLASS(NSCharacterSet) CLASS(MTLCompileOptions)
CLASS(MTLFunctionConstantValues)
#define PROTOCOL(name) @protocol name @end
PROTOCOL(MTLDevice) PROTOCOL(MTLLibrary) PROTOCOL(MTLCommandBuffer) PROTOCOL(MTLSharedEvent) PROTOCOL(MTLBuffer)
PROTOCOL(MTLComputePipelineState) PROTOCOL(MTLComputeCommandEncoder) PROTOCOL(MTLCommandQueue) PROTOCOL(MTLFunction)
PROTOCOL(MTLResidencySet) PROTOCOL(MTLBlitCommandEncoder)
typedef struct dispatch_group_s * dispatch_group_t;
typedef struct dispatch_queue_s * dispatch_queue_t;
