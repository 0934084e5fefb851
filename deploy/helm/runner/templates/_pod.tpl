{{/* As deploy/kubernetes/base: test_the_chart_gives_what_kustomize_gives compares them. The reasons are written there. */}}

{{- define "runner.labels" -}}
app.kubernetes.io/name: runner
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "runner.failurePolicy" -}}
rules:
  - action: FailJob # Usage, deterministic, no progress, no valid checkpoint.
    onExitCodes: {containerName: runner, operator: In, values: [2, 78, 79, 81]}
  - action: Ignore # Checkpointed.
    onExitCodes: {containerName: runner, operator: In, values: [75]}
  - action: Ignore # Drained, preempted or evicted.
    onPodConditions: [{type: DisruptionTarget, status: "True"}]
  - action: Count # Storage, restart budget, bad node.
    onExitCodes: {containerName: runner, operator: In, values: [74, 76, 80]}
{{- end }}

{{- define "runner.template" -}}
{{- $several := gt (int .Values.nodes) 1 }}
{{- $suffix := ternary "-shared" "" $several }}
metadata:
  labels:
    {{- include "runner.labels" . | nindent 4 }}
  annotations:
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- if .Values.job }}
    # A Job does not notice that its ConfigMap has changed.
    checksum/job: {{ toYaml .Values.job | sha256sum }}
    {{- end }}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ add .Values.grace 30 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    {{- with .Values.tolerations }}{{ toYaml . | nindent 4 }}{{- end }}
  containers:
    - name: runner
      image: {{ .Values.image | quote }}
      terminationMessagePolicy: FallbackToLogsOnError
      args:
        - start
        - --grace={{ .Values.grace }}
        - --config={{ ternary "/etc/runner/job.yaml" .Values.config (not (empty .Values.job)) }}
        - --output-dir=/data/{{ .Release.Name }}
        {{- if $several }}
        - --local-addr=$(POD_IP)
        - --set=launch.rendezvous_timeout_s=3600
        {{- end }}
        {{- with .Values.args }}{{ toYaml . | nindent 8 }}{{- end }}
      {{- if $several }}
      ports:
        - {name: rendezvous, containerPort: 29500}
        - {name: peers, containerPort: 29501}
      {{- else }}
      ports: []
      {{- end }}
      env:
        - {name: HF_HOME, value: /cache/huggingface}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: huggingface, key: token, optional: true}}
        {{- if $several }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: PET_NNODES, value: {{ .Values.nodes | quote }}}
        - name: PET_NODE_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        - {name: PET_MASTER_ADDR, value: {{ printf "%s-node-0-0.%s" .Release.Name .Release.Name }}}
        - {name: PET_MASTER_PORT, value: "29500"}
        {{- end }}
        {{- with .Values.env }}{{ toYaml . | nindent 8 }}{{- end }}
      resources:
        requests:
          cpu: {{ .Values.resources.cpu | quote }}
          memory: {{ .Values.resources.memory }}
          nvidia.com/gpu: {{ .Values.gpus }}
        limits:
          memory: {{ .Values.resources.memory }}
          nvidia.com/gpu: {{ .Values.gpus }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        {{- if .Values.job }}
        - {name: job, mountPath: /etc/runner}
        {{- end }}
  volumes:
    - name: data
      persistentVolumeClaim: {claimName: {{ .Values.storage.data | default (print "training-data" $suffix) }}}
    - name: cache
      persistentVolumeClaim: {claimName: {{ .Values.storage.cache | default (print "model-cache" $suffix) }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.storage.shm }}}
    {{- if .Values.job }}
    - name: job
      configMap: {name: {{ .Release.Name }}-job}
    {{- end }}
{{- end }}
